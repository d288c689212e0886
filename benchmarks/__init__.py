"""Benchmarks that compare amago with other programs."""
