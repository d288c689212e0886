"""`[exploration]`: how far the acting policy deviates from its own choice while collecting."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from pipelines.config.base import SettingsModel, known
from pipelines.registry import Registry

EXPLORATIONS = Registry(
    "exploration",
    {name: f"pipelines.envs.exploration:{name}" for name in ("plain", "bilevel", "windowed", "none")},
)
_ONLY_FOR = {
    "late_start": ("bilevel",),
    "late_end": ("bilevel",),
    "edge": ("windowed",),
    "inner_epsilon": ("windowed",),
}


class ExplorationSettings(SettingsModel):
    """Exploration rate epsilon per actor and step: the probability of a random action, or the standard deviation of
    added noise (Box).

    `plain` anneals epsilon over training. `bilevel` also anneals it within every rollout, for tasks of a fixed horizon.
    `windowed` applies it only in the first and last `edge` steps of a rollout. `none` does not explore. `module:attr`
    is a custom schedule (see pipelines/envs/exploration.py).
    """

    kind: str = "plain"
    """Schedule: plain, bilevel, windowed, none, or module:attr."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a custom schedule."""
    start: float = Field(1.0, ge=0)
    """Epsilon at the beginning of training (bilevel: at a rollout's first step)."""
    end: float = Field(0.05, ge=0)
    """Epsilon once `steps` have passed (bilevel: at a rollout's first step)."""
    steps: int = Field(1_000_000, ge=1)
    """Steps of one actor over which `start` falls linearly to `end`."""
    randomize: bool = True
    """Multiply epsilon by a factor from U[0, 1), drawn for every rollout."""
    persistence: float = Field(1.0, ge=1)
    """Longest time, in steps, over which random actions persist: the noise of Box actions is correlated over this time
    and a random choice is repeated so many steps on average. Every rollout draws its own time, log-uniformly from 1 to
    this. 1: independent noise in every step. Not with `agent.action_mask`.
    """
    late_start: float = Field(0.8, ge=0)
    """bilevel: epsilon at a rollout's last step, at the beginning of training."""
    late_end: float = Field(0.01, ge=0)
    """bilevel: epsilon at a rollout's last step, once `steps` have passed."""
    edge: int = Field(3, ge=0)
    """windowed: steps at either end of a rollout in which the full epsilon applies."""
    inner_epsilon: float | None = Field(None, ge=0)
    """windowed: constant epsilon between the edges; unset: 0.5 / (horizon - 1), half a random step a
    rollout.
    """

    @field_validator("kind")
    @classmethod
    def _kind(cls, kind: str) -> str:
        return known(EXPLORATIONS, kind)

    @model_validator(mode="before")
    @classmethod
    def _nothing_ignored(cls, data: Any) -> Any:
        """Refuse a key that the chosen schedule does not read (unless it restates the default)."""
        if not isinstance(data, dict):
            return data
        kind = data.get("kind", "plain")
        for key, kinds in _ONLY_FOR.items():
            if key in data and kind not in kinds and data[key] != cls.model_fields[key].default:
                raise ValueError(f'\'{key}\' applies to kind = "{kinds[0]}" only, not to "{kind}"')
        return data
