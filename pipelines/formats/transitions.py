"""Steps as most tools store them, (o_t, a_t, r_t) a row, as trajectories that begin and end in an observation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pipelines.events import Notice
from pipelines.formats.intake import DecodedEpisodes

MOST_UNRELATED = 0.5  # share of unrelated rows from which on none are taken to be related
_RELATIVE, _ABSOLUTE = 1e-4, 1e-5  # rounding between an observation and its copy


@dataclass(frozen=True, kw_only=True)
class Steps:
    """S steps laid one after another, and k trajectories [begin, end) that cover them.

    `observation`, `following` (what a step led to; of some columns, or of none): (S, ...). `after`: column -> (k, ...),
    the observation after the last step where `known` (k,) says that it is in the data all the same. `unsure` (k,):
    where `following` is not to be believed. `label` (S, ...): None where steps have none.
    """

    begin: np.ndarray
    end: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    observation: Mapping[str, np.ndarray]
    action: np.ndarray
    reward: np.ndarray
    following: Mapping[str, np.ndarray] = field(default_factory=dict)
    after: Mapping[str, np.ndarray] = field(default_factory=dict)
    known: np.ndarray | None = None
    unsure: np.ndarray | None = None
    reset: np.ndarray | None = None
    label: np.ndarray | None = None

    def lay_out(self, *, keep_terminated: bool) -> _ArrangedSteps:
        """Give each trajectory its last observation.

        It is what `following` or `after` says. Where that is not known, a truncated trajectory loses its last step,
        whose observation is then the last one. So does a terminated trajectory, unless `keep_terminated`: then it
        repeats its last observation, from which no target is computed. A trajectory without a step left is not usable.
        """
        begin, end, terminated = self.begin, self.end, np.asarray(self.terminated, dtype=bool)
        known = np.full(len(begin), bool(self.following))
        if self.known is not None:
            known |= self.known
        if self.unsure is not None:
            known &= ~self.unsure
        dropped = ~(known | (terminated & keep_terminated))
        counts = end - begin - dropped
        usable = counts > 0
        if not usable.any():
            return _ArrangedSteps(raw=None, usable=usable, dropped=dropped)
        kept = np.ones(len(self.reward), dtype=bool)  # steps, and the observations before them
        kept[end[dropped] - 1] = False
        rows = (counts + 1)[usable]
        ends = np.cumsum(rows) - 1
        before = np.ones(int(rows.sum()), dtype=bool)
        before[ends] = False
        last = (end - 1)[usable]
        observation = {}
        for name, values in self.observation.items():
            laid = np.empty((len(before), *values.shape[1:]), dtype=values.dtype)
            laid[before] = values[kept]
            laid[ends] = values[last]
            if name in self.following:
                known = ~dropped[usable]
                laid[ends[known]] = self.following[name][last[known]]
            if self.known is not None and name not in self.following:
                seen = self.known[usable]
                laid[ends[seen]] = self.after[name][usable][seen]
            observation[name] = laid
        reset = None
        if self.reset is not None:
            reset = np.zeros(len(before), dtype=np.uint8)
            later = np.ones(len(before), dtype=bool)
            later[ends - rows + 1] = False
            reset[later] = self.reset[kept]
        over = (terminated & ~dropped)[usable]
        return _ArrangedSteps(
            raw=DecodedEpisodes(
                rows=rows.tolist(),
                observation=observation,
                action=self.action[kept],
                reward=self.reward.reshape(-1)[kept],
                terminated=over,
                truncated=np.asarray(self.truncated, dtype=bool)[usable] | ~over,
                reset=reset,
                label=None if self.label is None else self.label[kept],
            ),
            usable=usable,
            dropped=dropped,
        )


@dataclass(frozen=True, kw_only=True)
class _ArrangedSteps:
    """Trajectories as `EpisodeValidator` takes them; `usable`, `dropped` (k,): which there are, and which lost their
    last step.

    `raw` is None where none is usable.
    """

    raw: DecodedEpisodes | None
    usable: np.ndarray
    dropped: np.ndarray


def differ(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Whether rows differ by more than rounding, (n,); values that are not finite never differ."""
    if values.dtype.kind not in "fiub" or np.array_equal(values, others):  # texts are refused where they are taken
        return np.zeros(len(values), dtype=bool)
    if values.dtype.kind != "f":
        unlike = values != others
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            unlike = np.abs(values - others) > _ABSOLUTE + _RELATIVE * np.abs(others)
    return np.asarray(unlike.reshape(len(values), -1).any(axis=1))


def describe_breaks(what: str, breaks: int, rows: int, *, unrelated: bool) -> Notice:
    """Write the notice that a dataset is cut in `breaks` of `rows` places, or that its rows are `unrelated`."""
    text = f"{what}: in {breaks:,} of {rows:,} rows the next observation is not that of the next row: cut there"
    if unrelated:
        text = (
            f"{what}: {breaks / rows:.0%} of the rows are not followed by their next observation: it is a buffer of "
            "transitions, and each becomes a trajectory of one step"
        )
    return Notice(text=text, level="warning")
