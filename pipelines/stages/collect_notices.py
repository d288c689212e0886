"""Notices of a collect: why there are so many actors, and what its figures leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.config.exploration import ExplorationSettings
from pipelines.config.settings import Settings
from pipelines.events import Listener, Notice
from pipelines.stages.environment import FEW, STEPS
from pipelines.stages.identity import behaviour


def explain_size(steps: int, actors: int, horizon: int | None, listener: Listener) -> None:
    """Say why there are fewer actors, or more steps, than usual."""
    if horizon and (actors < FEW or steps > STEPS):
        text = f"{steps:,} steps of {actors} actor{'s' * (actors != 1)}: an episode may take {horizon:,}"
        listener(Notice(stage="collect", text=text))


def comment(metrics: Mapping[str, Any], horizon: int | None, listener: Listener) -> None:
    """Say what the means of `metrics` leave out, and how to collect more where nothing was to be done."""
    ended, unfinished, steps = metrics["trajectories"], metrics["unfinished"], metrics["steps"]
    if not steps:
        text = f"collector '{metrics['collector']}' has {metrics['steps_total']:,} steps already"
        listener(Notice(text=f"{text}; --add N collects N more"))
    elif not ended:
        longest = f", an episode takes up to {horizon:,}" if horizon else ""
        each = f"{steps // metrics['actors']:,} steps of each of {metrics['actors']} actors"
        hint = "there is no return: give more --steps, or fewer --actors"
        listener(Notice(text=f"no episode ended in {each}{longest}; {hint}", level="warning"))
    elif unfinished > ended:
        text = f"means are over the {ended:,} episodes that ended; {unfinished:,} longer ones were cut off at the end"
        listener(Notice(text=text, level="warning"))


def comment_exploration(settings: Settings, listener: Listener) -> None:
    """Say that a policy that could have explored by the settings did not."""
    if settings.exploration != ExplorationSettings() and behaviour(settings)["policy"] != "random":
        listener(Notice(text="the policy acted as it is (epsilon 0); --explore applies the schedule of [exploration]"))
