"""`module:attr`: trajectories from a user's own code.

`attr` is an iterable, or a function that returns one (it is called again for each pass). Each trajectory is a mapping

    observations   (T + 1, ...), or a mapping of such (nested ones become obs.a.b)
    actions        (T, ...), as the environment takes them
    rewards        (T,)
    terminated     whether it ended in a terminal state; else it was truncated
    labels         optional: (T, ...), the action that should have been taken at each of the first T observations
    env, task, seed, success, tags: optional, as columns of the table `trajectories`

The spaces are those of --env, else what the first trajectory looks like and the settings say.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from pipelines.errors import InputMissing, StageFailed, UsageError
from pipelines.formats.base import BATCH_BYTES, EPISODE, Request, as_tags
from pipelines.formats.intake import (
    DecodedEpisodes,
    EpisodeValidator,
    infer_action_space,
    infer_space,
    match_spaces,
    read_flags,
)
from pipelines.lake.spaces import OBSERVATION, Space, Spaces
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo
from pipelines.registry import Registry

_NEEDED = ("observations", "actions", "rewards", "terminated")
_KNOWN = (*_NEEDED, "labels", "env", "task", "seed", "success", "tags")


class UserImporter:
    """The importer of a user's own trajectories; see the module."""

    logp = False

    def __init__(self, request: Request) -> None:
        self._settings, self._name = request.settings, request.place
        self._what = f"source '{request.place}'"
        self._origin = Registry("source", {}).get(request.place)
        self._head: list[Any] = []
        self._once = None if callable(self._origin) else self._iterator()
        self.label = request.place.rpartition(":")[2]
        self.env = self.label
        self.fingerprint = hashlib.sha256(request.place.encode()).hexdigest()[:16]
        self.steps: int | None = None
        self.dropped = 0
        first = next(self._parts(), None)
        if first is None:
            raise InputMissing(f"{self._what} gives no trajectories")
        self.spaces, self.labelled = self._find_spaces(first, request.spaces), "labels" in first
        self._intake = EpisodeValidator(
            self.spaces,
            what=self._what,
            clip=self._settings.clip_actions,
            labelled=self.labelled,
            listener=request.listener,
        )

    @property
    def repeats(self) -> bool:
        """Whether it can be read twice."""
        return self._once is None

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _iterator(self) -> Iterator[Any]:
        try:
            found = self._origin() if callable(self._origin) else self._origin
            if not isinstance(found, Iterable):
                raise UsageError(f"{self._what} is neither an iterable nor a function that returns one")
            return iter(found)
        except (UsageError, InputMissing):
            raise
        except Exception as error:
            raise self._as_failure(error) from error

    def _as_failure(self, error: Exception) -> StageFailed:
        return StageFailed(f"{self._what} raised {type(error).__name__}: {error}", hint="-v shows where")

    def _parts(self) -> Iterator[Mapping[str, Any]]:
        """Yield its trajectories from the first on; the one of an iterator that was looked at comes again."""
        if self._once is None:
            source: Iterator[Any] = self._iterator()
        else:
            source = itertools.chain(self._head, self._once)
        for number in itertools.count():
            try:
                part = next(source)
            except StopIteration:
                return
            except Exception as error:
                raise self._as_failure(error) from error
            if self._once is not None and not self._head:
                self._head.append(part)
            missing = [name for name in _NEEDED if not isinstance(part, Mapping) or name not in part]
            if missing:
                raise InputMissing(f"{self._what}: trajectory {number} lacks {', '.join(missing)}")
            unknown = [str(name) for name in part if name not in _KNOWN]
            if unknown:
                raise InputMissing(
                    f"{self._what}: trajectory {number} has {', '.join(unknown)}, which would be lost",
                    hint=f"there may be {', '.join(_KNOWN)}",
                )
            yield part

    def _find_spaces(self, first: Mapping[str, Any], wanted: Spaces | None) -> Spaces:
        observed = dict(_flatten(first["observations"], OBSERVATION))
        if wanted is not None:
            return match_spaces({name: values.shape[1:] for name, values in observed.items()}, wanted, what=self._what)
        observation: dict[str, Space] = {n: infer_space(v.shape[1:], v.dtype) for n, v in observed.items()}
        action = np.asarray(first["actions"])
        space = infer_action_space(action, None, self._settings, what=self._what)
        return Spaces(observation=observation, action=space)

    def batches(self, start: int = 0) -> Iterator[Trajectories]:
        """Yield batches as `Importer` says."""
        held: list[tuple[int, Mapping[str, Any], dict[str, np.ndarray]]] = []
        size = self.dropped = 0
        for number, part in enumerate(self._parts()):
            if number < start:
                continue
            observed = self._check(number, part)
            if not len(part["rewards"]):
                self.dropped += 1
                continue
            held.append((number, part, observed))
            size += sum(values.nbytes for values in observed.values())
            if size >= BATCH_BYTES:
                yield self._batch(held)
                held, size = [], 0
        if held:
            yield self._batch(held)

    def _check(self, number: int, part: Mapping[str, Any]) -> dict[str, np.ndarray]:
        try:
            observed = dict(_flatten(part["observations"], OBSERVATION))
            action, steps = np.asarray(part["actions"]), len(part["rewards"])
            shape = np.shape(part["rewards"])
        except (TypeError, ValueError) as error:
            raise InputMissing(f"{self._what}: trajectory {number} does not hold arrays: {error}") from error
        if observed.keys() != self.spaces.observation.keys():
            raise InputMissing(
                f"{self._what}: trajectory {number} has the observations {', '.join(observed)}, "
                f"{', '.join(self.spaces.observation)} expected"
            )
        if shape != (steps,):
            raise InputMissing(
                f"{self._what}: the rewards of trajectory {number} have the shape {shape}, not ({steps},)"
            )
        if self.labelled != ("labels" in part) or (self.labelled and len(part["labels"]) != steps):
            raise InputMissing(
                f"{self._what}: trajectory {number} has {len(part.get('labels', ()))} labels and {steps} actions",
                hint="either every trajectory has labels, one for each action, or none has",
            )
        lengths = {name: len(values) for name, values in observed.items()}
        if len(part["actions"]) != steps or set(lengths.values()) != {steps + 1}:
            raise InputMissing(
                f"{self._what}: trajectory {number} has {steps} rewards, {len(part['actions'])} actions and "
                f"{max(lengths.values())} observations",
                hint="T actions and rewards have T + 1 observations, the last one included",
            )
        self._intake.require_shapes(number, observed, action)
        return observed

    def _batch(self, held: list[tuple[int, Mapping[str, Any], dict[str, np.ndarray]]]) -> Trajectories:
        parts = [part for _, part, _ in held]
        over = np.array(
            [
                read_flags(part["terminated"], f"terminated of trajectory {n}", what=self._what)[-1]
                for n, part, _ in held
            ]
        )
        raw = DecodedEpisodes(
            rows=[len(part["rewards"]) + 1 for part in parts],
            observation={name: np.concatenate([seen[name] for _, _, seen in held]) for name in self.spaces.observation},
            action=np.concatenate([np.asarray(part["actions"]) for part in parts]),
            reward=np.concatenate([np.asarray(part["rewards"]).reshape(-1) for part in parts]),
            terminated=over,
            truncated=~over,
            label=np.concatenate([np.asarray(part["labels"]) for part in parts]) if self.labelled else None,
        )
        columns = self._intake.columns(raw, first=held[0][0])
        return Trajectories(columns, raw.rows, [self._info(number, part) for number, part, _ in held])

    def _info(self, number: int, part: Mapping[str, Any]) -> TrajectoryInfo:
        seed = part.get("seed") or 0
        if not isinstance(seed, int | np.integer) or not -(2**63) <= seed < 2**63:
            raise InputMissing(f"{self._what}: the seed of trajectory {number} is {seed!r}, not a number of 64 bits")
        return TrajectoryInfo(
            env=str(part.get("env") or self.env),
            task=str(part.get("task") or self._settings.task or self.label),
            source="own",
            seed=int(seed),
            success=None if part.get("success") is None else bool(part["success"]),
            tags={**as_tags(part.get("tags") or {}), EPISODE: str(number)},
        )


def _flatten(value: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _flatten(member, f"{name}.{key}")
    else:
        yield name, np.asarray(value)
