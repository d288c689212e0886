"""`[relabel]` and `train.relabel`: experience relabelled with other goals and rewards."""

from __future__ import annotations

from pydantic import Field, model_validator

from pipelines.config.base import SettingsModel


class GoalSettings(SettingsModel):
    """`[relabel.goal]`: what reaching a goal means, if the environment's own rule does not define it."""

    rule: str = ""
    """Goal rule: of an environment by name, or `module:attr`; empty: that of the trajectories' environment."""
    tolerance: float | None = Field(None, ge=0)
    """Instead of a rule: a goal is reached within this (Euclidean) distance."""
    reward: float = 1.0
    """With `tolerance`: reward of a step at the goal."""
    step_reward: float = 0.0
    """With `tolerance`: reward of any other step."""
    ends: bool = True
    """With `tolerance`: whether reaching the goal terminates the episode."""
    achieved: str = ""
    """Column of achieved goals; empty: the one that the rule names."""
    goals: str = ""
    """Column of desired goals; empty: the one that the rule names."""


class RelabelSettings(SettingsModel):
    """`[relabel]`: derive new goals and rewards as an overlay."""

    relabeler: str | tuple[str, ...] = "hindsight"
    """`NAME`, `NAME:ARGUMENT` (as `hindsight:final`) or `module:attr`; several are applied one after the other."""
    strategy: str = "future"
    """Argument of `hindsight`, if it is named without one."""
    where: str = ""
    """SQL predicate over the `trajectories` table; empty: all."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of the matching trajectories to relabel."""
    copies: int = Field(1, ge=1, le=64)
    """Relabelled versions of each trajectory."""
    goal: GoalSettings = GoalSettings()

    @property
    def relabelers(self) -> tuple[str, ...]:
        """Relabelers to apply, in order, each with its argument."""
        return tuple(f"hindsight:{self.strategy}" if name == "hindsight" else name for name in self._named)

    @property
    def _named(self) -> tuple[str, ...]:
        return (self.relabeler,) if isinstance(self.relabeler, str) else self.relabeler

    @model_validator(mode="after")
    def _copies_differ(self) -> RelabelSettings:
        if self.copies > 1 and self.relabelers == ("hindsight:final",):
            raise ValueError("'copies' of hindsight:final would all be alike; take 1, or hindsight:future or :random")
        return self

    @model_validator(mode="after")
    def _strategy_is_used(self) -> RelabelSettings:
        if self.strategy != "future" and "hindsight" not in self._named:
            raise ValueError(f"'strategy' is that of hindsight; write NAME:{self.strategy} for another relabeler")
        return self


class ReplaySettings(SettingsModel):
    """`[train.relabel]`: relabelled versions of windows, made as they are drawn and stored nowhere.

    Version k of a trajectory is the one that `amago relabel` stores as its k-th copy for the same seed.
    """

    relabeler: tuple[str, ...] = ()
    """As `relabel.relabeler`; empty: none."""
    share: float = Field(0.5, gt=0, le=1)
    """Share of relabelled windows, among those of trajectories that have versions."""
    where: str = ""
    """SQL predicate over the `trajectories` table that selects the originals that have versions; empty: all."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of the matching trajectories that have versions."""
    copies: int = Field(1_000_000, ge=1, le=1_000_000_000)
    """Versions of each, drawn uniformly."""
    goal: GoalSettings = GoalSettings()
