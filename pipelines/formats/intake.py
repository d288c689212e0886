"""From arrays as other tools store them to step columns, with everything refused that would poison a lake."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.config.settings import SourceSettings
from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Listener, Notice, silent
from pipelines.lake.schema import ACTION, LABEL, LOGP, RESET, REWARD, TERMINATED, TRUNCATED, Schema
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space, Spaces

TOLERANCE = 1e-4  # of a bound's range: rounding of other tools, moved to the bound


@dataclass(frozen=True, kw_only=True)
class DecodedEpisodes:
    """Whole trajectories laid one after another, R rows and S = R - len(rows) steps in all.

    `rows`: T + 1 of each. `observation`: (R, ...) by column name; `action`, `reward`: (S, ...); `terminated`,
    `truncated`: of each trajectory; `reset`: (R,), None for none; `label`: (S, ...), of the observation that an action
    was taken at, None where steps have none; `logp`: (S,), log-probabilities of the actions, or None.
    """

    rows: Sequence[int]
    observation: Mapping[str, np.ndarray]
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    reset: np.ndarray | None = None
    label: np.ndarray | None = None
    logp: np.ndarray | None = None


class EpisodeValidator:
    """The check and conversion of one dataset: decoded trajectories in, step columns out, with labels if `labelled`,
    and with log-probabilities of actions if `logp`.

    `native`: actions are as the environment takes them; else as the lake stores them. `what` names the source.
    `listener` hears once what is rounded.
    """

    def __init__(
        self,
        spaces: Spaces,
        *,
        what: str,
        clip: bool = False,
        native: bool = True,
        labelled: bool = False,
        logp: bool = False,
        listener: Listener = silent,
    ) -> None:
        self.schema = Schema(spaces, labelled=labelled, logp=logp)
        self._listener, self._reported = listener, False
        self._spaces, self._what, self._clip, self.native = spaces, what, clip, native

    def require_shapes(self, number: int, observation: Mapping[str, np.ndarray], action: np.ndarray) -> None:
        """Raise InputMissing unless a step of trajectory `number` has as many numbers as the spaces say."""
        for name, space in {**self._spaces.observation, ACTION: self._spaces.action}.items():
            values = np.asarray(action) if name == ACTION else observation[name]
            found, wanted = _count(values.shape[1:]), _count(space.shape)
            one_hot = name == ACTION and isinstance(space, Discrete) and found == space.n
            if values.dtype.kind not in "biuf" or (found != wanted and not one_hot):
                what = f"{found} {values.dtype}" if values.ndim else "no sequence of"
                raise InputMissing(
                    f"{self._what}: '{name}' has {what} values a step in trajectory {number}, {wanted} expected",
                    hint="one source has trajectories of one space",
                )

    def columns(self, raw: DecodedEpisodes, *, first: int) -> dict[str, np.ndarray]:
        """Convert to step columns; `first` is the number of the first trajectory, for messages.

        IntegrityError for what is not finite, InputMissing for what is outside the spaces.
        """
        rows = np.asarray(raw.rows)
        ends = np.cumsum(rows) - 1
        starts = ends + 1 - rows
        later = np.ones(int(rows.sum()), dtype=bool)
        later[starts] = False
        place = _Locator(self._what, first, starts, later)
        self._report_rounding({**raw.observation, ACTION: raw.action, REWARD: raw.reward})
        columns = {
            name: self._convert_observation(name, space, raw.observation[name], place)
            for name, space in self._spaces.observation.items()
        }
        columns[ACTION] = _spread(self._convert_action(raw.action, place), later)
        if self.schema.labelled:
            if raw.label is None:
                raise InputMissing(f"{self._what}: trajectory {first} has no labels, unlike those before it")
            not_last = np.ones(len(later), dtype=bool)
            not_last[ends] = False
            columns[LABEL] = _spread(self._convert_action(raw.label, place, name=LABEL), not_last)
        if self.schema.logp:
            if raw.logp is None:
                raise InputMissing(f"{self._what}: trajectory {first} has no logp, unlike those before it")
            logp = np.asarray(raw.logp)
            _require_numbers(logp, LOGP, self._what)
            logp = logp.reshape(-1).astype(np.float32)
            place.require((logp <= 0) & np.isfinite(logp), LOGP, "is not the logarithm of a probability", of_step=True)
            columns[LOGP] = _spread(logp, later)
        reward = np.asarray(raw.reward)
        _require_numbers(reward, REWARD, self._what)
        with np.errstate(over="ignore"):  # what is too large is not finite then
            reward = reward.reshape(-1).astype(np.float32, copy=False)
        place.require(np.isfinite(reward), "reward", "is not finite", of_step=True)
        columns[REWARD] = _spread(reward, later)
        columns |= {name: np.zeros(len(later), dtype=np.uint8) for name in (TERMINATED, TRUNCATED, RESET)}
        columns[TERMINATED][ends], columns[TRUNCATED][ends] = raw.terminated, raw.truncated
        if raw.reset is not None:
            reset = np.asarray(raw.reset).reshape(-1)
            _require_numbers(reset, RESET, self._what)
            place.require((reset == 0) | (reset == 1), RESET, "is not 0 or 1")
            columns[RESET][...] = reset
        return columns

    def _report_rounding(self, arrays: Mapping[str, np.ndarray]) -> None:
        if self._reported:
            return
        rounded: dict[str, list[str]] = {}
        stored = {**self._spaces.observation, ACTION: self._spaces.action}
        for name, values in arrays.items():
            values = np.asarray(values)
            becomes = np.dtype(stored[name].dtype) if name in stored else np.dtype(np.float32)
            if values.dtype.kind in "iuf" and becomes.kind == "f" and values.dtype.itemsize >= becomes.itemsize:
                with np.errstate(over="ignore", invalid="ignore"):
                    same = values.astype(becomes).astype(values.dtype)
                if not np.array_equal(values, same, equal_nan=values.dtype.kind == "f"):
                    rounded.setdefault(f"{values.dtype} is rounded to {becomes}", []).append(name)
        for how, names in rounded.items():
            self._reported = True
            self._listener(Notice(text=f"{self._what}: {', '.join(names)}: {how}"))

    def _convert_observation(self, name: str, space: Space, values: np.ndarray, place: _Locator) -> np.ndarray:
        values = np.asarray(values)
        _require_numbers(values, name, self._what)
        size = _count(values.shape[1:])
        if size != _count(space.shape):
            raise InputMissing(f"{self._what}: '{name}' has {size} values a step, its space says {space.shape}")
        stored = self._store(name, space, values.reshape(len(values), *space.shape), place)
        if stored.dtype.kind == "f":
            place.require(_is_finite(stored), name, "is not finite")
        return stored

    def _store(self, name: str, space: Space, values: np.ndarray, place: _Locator) -> np.ndarray:
        """Convert to the dtype of `space`; discrete values are counted from 0."""
        of_step = name in (ACTION, LABEL)
        if self.native and isinstance(space, Discrete | MultiDiscrete) and space.start is not None:
            values = values - np.asarray(space.start)
        with np.errstate(invalid="ignore", over="ignore"):
            stored = values.astype(space.dtype, copy=False)
        if stored.dtype.kind != "f" and stored.dtype != values.dtype:
            fault = f"cannot be stored as {stored.dtype}, the dtype of its space"
            place.require(_every(stored == values), name, fault, of_step=of_step, fits=True)
        limit: np.ndarray | int | None = None
        if isinstance(space, Discrete):
            limit = space.n
        elif isinstance(space, MultiDiscrete):
            limit = np.array(space.nvec)
        elif isinstance(space, MultiBinary):
            limit = 2
        if limit is not None:
            fine = _every((stored >= 0) & (stored < limit))
            choices = (
                limit if isinstance(limit, int) else ", ".join(map(str, dict.fromkeys(limit.reshape(-1).tolist())))
            )
            place.require(fine, name, f"is outside its space of {choices} choices", of_step=of_step, fits=True)
        return stored

    def _convert_action(self, values: np.ndarray, place: _Locator, *, name: str = ACTION) -> np.ndarray:
        """Convert the actions (S, ...) of steps, or the labels: `name` says which."""
        space = self._spaces.action
        values = np.asarray(values)
        _require_numbers(values, name, self._what)
        size, wanted = _count(values.shape[1:]), _count(space.shape)
        if size != wanted:
            raise InputMissing(f"{self._what}: '{name}' has {size} values a step, its space {wanted}")
        values = values.reshape(len(values), *space.shape)
        if not isinstance(space, Box):
            return self._store(name, space, values, place)
        place.require(_is_finite(values), name, "is not finite", of_step=True)
        scaled = values
        if self.native and not is_plain(space):  # to [-1, 1]: the inverse of `restore_actions`
            middle, half = _find_scale(space)
            scaled = (values.astype(np.float64) - middle) / half
        if space.low is None:
            return scaled.astype(space.dtype, copy=False)
        allowed = 1 + 2 * TOLERANCE
        beyond = np.abs(scaled) > allowed
        if beyond.any() and not self._clip:
            what = "an action" if name == ACTION else "a label"
            place.refuse(
                _every(~beyond),
                f"{what} is {float(values[beyond].flat[0]):g}, outside its bounds",
                hint="give them by source.action_low and source.action_high, name the environment by --env, or "
                "set source.clip_actions"
                if self.native
                else "these files hold actions in [-1, 1]; set source.clip_actions",
            )
        return np.clip(scaled, -1, 1).astype(space.dtype, copy=False)


def _count(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _require_numbers(values: np.ndarray, name: str, what: str) -> None:
    if values.dtype.kind not in "biuf":
        raise InputMissing(f"{what}: '{name}' holds {values.dtype}, not numbers")


def is_plain(space: Box) -> bool:
    """Whether the environment takes actions of this space as they are stored."""
    return space.low is None or (set(space.low) <= {-1.0} and set(space.high or ()) <= {1.0})


def restore_actions(values: np.ndarray, space: Box) -> np.ndarray:
    """Scale (n, *shape) stored actions to those of the environment: float64, unless there is nothing to do."""
    if is_plain(space):
        return values
    middle, half = _find_scale(space)
    return middle + values.astype(np.float64) * half


def _find_scale(space: Box) -> tuple[np.ndarray, np.ndarray]:
    assert space.low is not None
    assert space.high is not None
    low, high = (np.asarray(bound, dtype=np.float64).reshape(space.shape) for bound in (space.low, space.high))
    return (low + high) / 2, np.where(high > low, (high - low) / 2, 1.0)


def read_flags(values: Any, name: str, *, what: str, first: int = 0) -> np.ndarray:
    """Read flags of any number type as (n,) bool. IntegrityError for what is not 0 or 1; `first` is the row of the
    first, for the message.
    """
    found = np.asarray(values)
    _require_numbers(found, name, what)
    found = found.reshape(-1)
    fine = (found == 0) | (found == 1)
    if not fine.all():
        row = int(np.argmin(fine))
        shown = "NaN" if np.isnan(found[row]) else f"{found[row]:g}"
        raise IntegrityError(
            f"{what}: '{name}' is {shown} at row {first + row:,}, not 0 or 1", hint="leave it out, or correct the file"
        )
    return np.asarray(found == 1)


class _Locator:
    """Says where in a batch a fault is."""

    def __init__(self, what: str, first: int, starts: np.ndarray, later: np.ndarray) -> None:
        self._what, self._first, self._starts, self._later = what, first, starts, later

    def require(self, fine: np.ndarray, name: str, fault: str, *, of_step: bool = False, fits: bool = False) -> None:
        """Raise IntegrityError (`fits`: InputMissing) at the first of `fine`, (R,) or (S,), that is false."""
        if not fine.all():
            text = f"{self._what}: '{name}' {fault}, {self._describe(fine, of_step)}"
            raise InputMissing(text) if fits else IntegrityError(text, hint="leave it out, or correct the file")

    def refuse(self, fine: np.ndarray, fault: str, *, hint: str) -> None:
        raise InputMissing(f"{self._what}: {fault}, {self._describe(fine, True)}", hint=hint)

    def _describe(self, fine: np.ndarray, of_step: bool) -> str:
        row = int(np.argmin(fine))
        if of_step:  # steps are rows but the first of each trajectory
            row = int(np.flatnonzero(self._later)[row])
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return f"at step {row - int(self._starts[number]) - of_step} of trajectory {self._first + number}"


def _every(fine: np.ndarray) -> np.ndarray:
    """Whether all of a row is true, (n,)."""
    return np.asarray(fine.reshape(len(fine), -1).all(axis=1))


def _is_finite(values: np.ndarray) -> np.ndarray:
    """Whether a row is finite, (n,). The sum is tried first: one pass, and no array."""
    if values.dtype.kind != "f" or np.isfinite(np.add.reduce(values, axis=None, dtype=np.float64)):
        return np.ones(len(values), dtype=bool)
    return _every(np.isfinite(values))


def _spread(values: np.ndarray, later: np.ndarray) -> np.ndarray:
    """Spread values of steps over the rows that are true in `later`, with zeros in the others."""
    out = np.zeros((len(later), *values.shape[1:]), dtype=values.dtype)
    out[later] = values
    return out


def infer_space(values_shape: Sequence[int], dtype: np.dtype) -> Box:
    """Infer the space of an observation from a step's shape and dtype."""
    if dtype == np.uint8 or dtype == np.bool_:
        kind = "uint8"
    else:
        kind = "int32" if dtype.kind in "iu" else "float32"
    return Box(shape=tuple(int(n) for n in values_shape), dtype=kind)


def make_action_box(shape: Sequence[int], settings: SourceSettings, *, what: str) -> Box:
    """Make the space of actions with the bounds of the settings. InputMissing if they do not fit."""
    size = _count(shape)
    bounds = []
    for bound in (settings.action_low, settings.action_high):
        values = (float(bound),) * size if isinstance(bound, float | int) else tuple(map(float, bound))
        if len(values) != size:
            raise InputMissing(f"{what}: {len(values)} bounds of actions are given, an action has {size} values")
        bounds.append(values)
    low, high = bounds
    if not all(a < b for a, b in zip(low, high, strict=True)):
        raise InputMissing(f"{what}: source.action_low is not below source.action_high")
    return Box(shape=tuple(int(n) for n in shape), low=low, high=high)


def infer_action_space(
    actions: np.ndarray, find_largest: Callable[[], int] | None, settings: SourceSettings, *, what: str
) -> Space:
    """Infer the space of actions from some (n, ...): choices for whole numbers, truth values, and where
    `source.num_actions` says how many there are; else numbers within the bounds of the settings. `find_largest` reads
    all whole numbers for the largest; InputMissing where it is None and needed.
    """
    shape = actions.shape[1:]
    is_whole, count = actions.dtype.kind in "iu", settings.num_actions
    if not (is_whole or count or actions.dtype.kind == "b"):
        return make_action_box(shape, settings, what=what)
    if is_whole and not count:
        if find_largest is None:
            hint = "say how many: --set source.num_actions=N, or give --env"
            raise InputMissing(f"{what} has discrete actions", hint=hint)
        count = max(1 + find_largest(), 1)
    count = count or 2  # truth values
    size = _count(shape)
    return Discrete(n=count) if size == 1 else MultiDiscrete(nvec=(count,) * size)


def match_spaces(found: Mapping[str, Sequence[int]], wanted: Spaces, *, what: str) -> Spaces:
    """Return `wanted`, the spaces of the environment. InputMissing if observations of these shapes do not fit."""

    def describe(shape: Sequence[int] | None) -> str:
        return "nothing" if shape is None else f"{_count(shape)} values"

    problems = [
        f"{name}: {describe(found.get(name))} in the source, "
        f"{describe(space.shape if space else None)} of the environment"
        for name in dict.fromkeys([*found, *wanted.observation])
        for space in [wanted.observation.get(name)]
        if name not in found or space is None or np.prod(found[name]) != np.prod(space.shape)
    ]
    if problems:
        raise InputMissing(
            f"{what} does not fit the environment: {'; '.join(problems)}",
            hint="name another --env, or none, or map its columns with source.columns",
        )
    return wanted
