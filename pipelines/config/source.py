"""`[source]`: data collected elsewhere, and how to interpret its columns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipelines.config.base import PACING, TARGET, SettingsModel, count_or_auto


class SourceSettings(SettingsModel):
    """`[source]`: what `collect --from` imports into a lake."""

    name: str = ""
    """`hdf5:FILE`, `d4rl:FILE-or-NAME`, `robomimic:FILE`, `d3rlpy:FILE`, `minari:DIR-or-ID`, `npz:DIR-or-FILE`,
    `lerobot:DIR`, `parquet:GLOB`, `arrow:GLOB` (without KIND: as the suffix or the folder shows), `module:attr`;
    empty: none."""
    lake: str = ""
    """Destination: a lake, `{run}/offline` for one of the run that never expires; empty: the run's own."""
    steps: Annotated[int, TARGET] = Field(0, ge=0)
    """Import whole trajectories until this many steps are in the lake (0: all)."""
    task: str = ""
    """`task` of the trajectories, if the source does not say; empty: its own name."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Map our columns to the file's, e.g. obs.x = "position"; `name[0:27]` takes some columns of an array."""
    layout: Literal["transitions", "arrival"] = "transitions"
    """Rows of a table: `transitions` hold a step and what it led to; `arrival` has T + 1 rows for T actions."""
    action_low: float | tuple[float, ...] = -1.0
    """Lower bound of the source environment's actions, if neither it nor --env says so."""
    action_high: float | tuple[float, ...] = 1.0
    """Upper bound of the source environment's actions."""
    num_actions: int = Field(0, ge=0)
    """Choices of a discrete action, if not otherwise known (0: one more than the maximum found)."""
    clip_actions: bool = False
    """Clip actions that are out of bounds, instead of refusing them."""
    horizon: Annotated[int | Literal["auto"], count_or_auto(0, 1_000_000_000)] = "auto"
    """Steps after which the source's environment was reset, where a file marks no timeouts (0: every end is marked);
    auto: the time limit of `--env` or of D4RL's environment."""
    longest: int = Field(10_000, ge=1)
    """A longer trajectory is stored in pieces; each but the last is truncated, and the next begins where it ends."""
    missing_final: Literal["repeat", "drop"] = "repeat"
    """Where the last observation of a terminated trajectory is missing, repeat the one before or drop the last step."""
    max_length: int = Field(256, ge=1)
    """Maximum length of texts and sequences whose space sets no limit."""
    check: Annotated[bool, PACING] = True
    """Read everything once before the first trajectory is stored, so that a bad source is refused as a whole."""
