"""Training settings that depend on the data: the environment of the lakes, and the context length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.config.model import WITHOUT_MEMORY, AgentSettings
from pipelines.config.settings import EnvSettings, TrainSettings
from pipelines.envs.make import find_settings_model
from pipelines.errors import InputMissing, UsageError
from pipelines.events import Listener, Notice
from pipelines.lake import collectors
from pipelines.lake.store import Lake


def find_longest_episode(lakes: Sequence[Lake]) -> int | None:
    """Find the maximum episode length of the environments that filled `lakes`, otherwise of the stored episodes; None
    if there are none."""
    found = [record.get("horizon") for lake in lakes for record in collectors.read_all(lake).values()]
    known = [horizon for horizon in found if isinstance(horizon, int) and horizon > 0]
    if not found or len(known) < len(found):
        from pipelines.lake.sql.catalog import query  # imports duckdb, which starts threads: see `ForkServer`

        lengths = [query(lake, "select max(length) from trajectories")[1][0][0] for lake in lakes]
        known += [length for length in lengths if length is not None]
    return max(known, default=None)


def find_environment(lakes: Sequence[Lake], env: EnvSettings, listener: Listener) -> EnvSettings:
    """Find the environment that filled `lakes`, unless `env` names one. The listener gets a warning if there are
    several, or if the named one is not among them."""
    found: list[dict[str, Any]] = []  # without names that only an imported dataset gave
    for lake in lakes:
        for record in collectors.read_all(lake).values():
            each = {key: value for key, value in (record.get("env") or {}).items() if key != "source"}
            if isinstance(each.get("name"), str) and each["name"] and each not in found and _exists(each["name"]):
                found.append(each)
    named = env.name
    if not found or (named and any(not find_differences(env, each) for each in found)):
        return env
    if not named and len(found) == 1:
        return EnvSettings.model_validate(found[0])
    if named and len(found) == 1:
        text = f"the run's environment is not the lake's: {'; '.join(find_differences(env, found[0]))}"
    else:
        params = (" ".join(f"{key}={value}" for key, value in each.items() if key != "name") for each in found)
        kinds = ", ".join(sorted(f"{each['name']} {text}".strip() for each, text in zip(found, params, strict=True)))
        text = f"the lakes were filled in {len(found)} environments ({kinds})"
        text += f", not in '{named}'" if named else "; evaluate will need --env"
    listener(Notice(text=text, level="warning"))
    return env


def find_differences(ours: EnvSettings, theirs: Mapping[str, Any]) -> list[str]:
    """Write a phrase for each setting of our environment that differs from `theirs`."""
    mine = ours.model_dump(mode="json")
    if mine["name"] != theirs["name"]:
        return [f"env.name is {mine['name']!r}, not {theirs['name']!r}"]
    return [
        f"env.{key} is {mine.get(key)!r}, not {theirs.get(key)!r}"
        for key in sorted({**mine, **theirs})
        if mine.get(key) != theirs.get(key)
    ]


def _exists(name: str) -> bool:
    """Check whether an environment of that name exists, installed and trusted or not."""
    try:
        find_settings_model(name)
    except InputMissing:
        return True
    except UsageError:
        return False
    return True


def with_stored_window(train: TrainSettings, stored: Mapping[str, Any]) -> TrainSettings:
    """Replace "auto" by the context length of a run in progress, if it is `stored`."""
    begun = stored.get("train", {}).get("context_length")
    return _with_window(train, begun) if isinstance(begun, int) else train


def with_window(train: TrainSettings, agent: AgentSettings, horizon: int | None, listener: Listener) -> TrainSettings:
    """Replace "auto" by a number in the context length. `horizon`: maximum episode length, None
    if unknown. The listener gets a warning with both numbers if the context is shorter and the agent has a memory."""
    train = _with_window(train, train.context_length_for(horizon))
    window = train.resolved_context_length
    if horizon is not None and window < horizon and agent.sequence.kind not in WITHOUT_MEMORY:
        text = f"the agent's context is {window:,} steps (train.context_length), an episode takes up to {horizon:,}"
        text += ": what happened earlier than that cannot be remembered"
        listener(Notice(text=text, level="warning"))
    return train


def _with_window(train: TrainSettings, window: int) -> TrainSettings:
    return train.model_copy(update={"context_length": window}) if train.context_length == "auto" else train
