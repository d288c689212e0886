"""Experiment trackers: where a run's configuration, metrics, evaluations, pictures and videos are sent."""
