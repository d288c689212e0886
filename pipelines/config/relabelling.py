"""`[relabel]` and `train.relabel`: experience as it would have been with other goals and rewards."""

from __future__ import annotations

from pydantic import Field, model_validator

from pipelines.config.base import SettingsModel


class GoalSettings(SettingsModel):
    """`[relabel.goal]`: what reaching a goal means, where an environment's own rule does not say it."""

    rule: str = ""
    """Whose rule holds: an environment's name, or `module:attr`; empty: that of the trajectories' environment."""
    tolerance: float | None = Field(None, ge=0)
    """Instead of a rule: a goal is reached within this (Euclidean) distance."""
    reward: float = 1.0
    """With `tolerance`: what a step pays that is at the goal."""
    step_reward: float = 0.0
    """With `tolerance`: what any other step pays."""
    ends: bool = True
    """With `tolerance`: whether reaching the goal ends the episode."""
    achieved: str = ""
    """Column of what was achieved; empty: the one that the rule names."""
    goals: str = ""
    """Column of what was asked; empty: the one that the rule names."""


class RelabelSettings(SettingsModel):
    """`[relabel]`: derive new goals and rewards as an overlay."""

    relabeler: str | tuple[str, ...] = "hindsight"
    """`NAME`, `NAME:ARGUMENT` (as `hindsight:final`) or `module:attr`; several are applied one after the other."""
    strategy: str = "future"
    """The argument of `hindsight`, where it is given without one."""
    where: str = ""
    """SQL predicate over the `trajectories` table; empty: all."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of the matching trajectories to relabel."""
    copies: int = Field(1, ge=1, le=64)
    """Relabelled versions of each."""
    goal: GoalSettings = GoalSettings()

    @property
    def relabelers(self) -> tuple[str, ...]:
        """What is applied, in order, each with its argument."""
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
    """`[train.relabel]`: windows of relabelled versions that are made as they are drawn, and stored nowhere.

    Version k of a trajectory is the one that `amago relabel` stores as its k-th copy for the same seed.
    """

    relabeler: tuple[str, ...] = ()
    """As `relabel.relabeler`; empty: none."""
    share: float = Field(0.5, gt=0, le=1)
    """Of the windows of a trajectory that has versions, the share that show one of them."""
    where: str = ""
    """SQL predicate over the `trajectories` table: which have versions; empty: all originals."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of those that have versions."""
    copies: int = Field(1_000_000, ge=1, le=1_000_000_000)
    """Versions of each, all drawn alike."""
    goal: GoalSettings = GoalSettings()
