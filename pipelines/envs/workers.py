"""Environments in worker processes: N actors as one `Env`, each worker stepping a slice of them.

What is played does not depend on the number of workers. The actors are two parts: one can be stepped while actions are
chosen for the other. With at least as many workers as cores each part has workers of its own, and goes on as soon as
these have answered; they wait for this process anyway. With more cores every worker has a slice of both parts, so that
none waits. A worker that dies loses the episodes of its actors, which fail; it is replaced when they are reset.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pipelines.config.base import SettingsModel
from pipelines.config.cores import available_cores
from pipelines.envs.env import ActorsFailed, Env, EnvSpec, EpisodeCounter, Failure, RemoteTraceback, StepResult, Trial
from pipelines.envs.make import Split
from pipelines.envs.process import Died, Worker
from pipelines.envs.worker import CALL, RESET, STEP, Board, Order, boards, nameless_file
from pipelines.errors import UsageError
from pipelines.events import Listener, silent

_NEVER = -1
_LOST = 0  # no request has this number


class Part(Env):
    """Some consecutive actors, of which each of `workers` has a slice. Made by `WorkerEnv`."""

    def __init__(
        self, spec: EnvSpec, number: int, board: Board, workers: Sequence[Worker], episodes: EpisodeCounter
    ) -> None:
        super().__init__(num_envs=episodes.num_envs)
        self.spec, self.episodes = spec, episodes
        self._number, self._board, self._workers = number, board, workers
        self._slices = [worker.order.slices[number] for worker in workers]
        self._apart = all(len(worker.order.slices) == 1 for worker in workers)
        self._lives = [_NEVER] * len(workers)  # generation of each worker that knows our actors
        self._asked: list[int] | None = None
        self._ready = np.zeros(self.num_envs, dtype=bool)  # have begun the episode that is yet to be asked for
        self._not_begun: list[Failure] = []
        # Task, goal, achievements and seed of an episode that has ended.
        self._told: dict[int, tuple[str, str, np.ndarray, int | None]] = {}
        self._seen = {name: np.zeros_like(column) for name, column in board.begun.items()}

    def step(self, actions: np.ndarray) -> StepResult:
        self.begin_step(actions)
        return self.end_step()

    def begin_step(self, actions: np.ndarray) -> None:
        self._board.action[:] = actions
        self._asked = [self._ask(i, STEP) for i in range(len(self._workers))]

    @property
    def waits_on(self) -> list[int]:
        if self._asked is None or not self._apart:  # of several parts, any may be the one that is answered
            return []
        return [w.fileno() for w, number in zip(self._workers, self._asked, strict=True) if number != _LOST]

    def linger(self) -> None:
        for worker in self._workers:
            worker.linger()

    def end_step(self) -> StepResult:
        assert self._asked is not None, "begin_step comes first"
        asked, self._asked = self._asked, None
        failures: list[Failure] = []
        lost = np.zeros(self.num_envs, dtype=bool)
        for i, number in enumerate(asked):
            answer = self._answer(i, number)
            if answer is None:
                lost[self._slices[i]] = True
                failures.append(self._loss(i, lost))
                continue
            failures += self._placed(i, answer.get("failures", ()))
            if "ended" in answer:
                ended, *facts = answer["ended"]
                actors = [self._slices[i].start + actor for actor in ended]
                self._ready[actors] = True
                self._told.update(zip(actors, zip(*facts, strict=True), strict=True))
                self._not_begun += self._placed(i, answer.get("begin failures", ()))
        result = self._board.take()
        self._seen = result.observation
        if failures:
            if lost.any():  # whose rows are of the step before
                for array in (*result.observation.values(), *(getattr(result, name) for name in _BROUGHT)):
                    array[lost] = 0
            raise _failed(failures, result)
        return result

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        mask = np.ones(self.num_envs, dtype=bool) if mask is None else mask
        failures = [each for each in self._not_begun if mask[list(each.actors)].any()]
        self._not_begun = [each for each in self._not_begun if each not in failures]
        waiting = mask & ~self._ready
        if waiting.any():
            failures += self._begin(waiting)
        self.episodes.advance(np.flatnonzero(mask))
        self._ready &= ~mask
        for actor in np.flatnonzero(mask).tolist():
            self._told.pop(actor, None)
        columns = {name: column.copy() for name, column in self._seen.items()}
        for name, column in columns.items():
            column[mask] = self._board.begun[name][mask]
        self._seen = columns
        if failures:
            raise _failed(failures, columns)
        return columns

    def _begin(self, waiting: np.ndarray) -> list[Failure]:
        """Have workers begin episodes of the actors in `waiting`."""
        self._board.mask[:] = waiting
        self._board.current[:] = self.episodes.current + self.episodes.total * self._ready
        asked = {}
        dead = [worker for i, worker in enumerate(self._workers) if worker.dead and self._begins(i, waiting)]
        for worker in dead:  # all of them before any is waited for
            worker.replace()
        for worker in dead:
            worker.introduced()
        for i, mine in enumerate(self._slices):
            if not waiting[mine].any():
                continue
            if self._begins(i, waiting):
                self._lives[i] = self._workers[i].generation
            asked[i] = self._ask(i, RESET)
        failures = []
        for i, number in asked.items():
            answer = self._answer(i, number)
            if answer is None:
                lost = np.zeros_like(waiting)
                lost[self._slices[i]] = waiting[self._slices[i]]
                failures.append(self._loss(i, lost))
            else:
                failures += self._placed(i, answer.get("begin failures", ()))
        return failures

    def _begins(self, i: int, waiting: np.ndarray) -> bool:
        """Whether all episodes that worker `i` plays for us begin with those in `waiting`."""
        mine = waiting[self._slices[i]]
        return bool(mine.any() and (mine.all() or self._lives[i] == _NEVER))

    def _ask(self, i: int, what: bytes, rest: bytes = b"") -> int:
        """A request to worker `i`; _LOST where it has died since our actors were reset."""
        if self._lives[i] == self._workers[i].generation:
            with contextlib.suppress(Died):
                return self._workers[i].ask(what, self._number, rest)
        return _LOST

    def _answer(self, i: int, number: int) -> dict[str, Any] | None:
        """None where the worker has died."""
        if number != _LOST and self._lives[i] == self._workers[i].generation:
            with contextlib.suppress(Died):
                return self._workers[i].answer(number)
        return None

    def _loss(self, i: int, whose: np.ndarray) -> Failure:
        """That a worker has died, as far as our actors are concerned."""
        worker, mine, life = self._workers[i], self._slices[i], self._lives[i]
        told = life in worker.mourned
        worker.mourned.add(life)
        actors = tuple((np.flatnonzero(whose[mine]) + mine.start).tolist())
        text = f"environment '{self.spec.name}' is gone: {worker.obituaries[life]}, which played {worker.actors}"
        return Failure(actors=actors, message=text, told=told, in_a_row=worker.early_ends)

    def _placed(self, i: int, failures: Sequence[Failure]) -> list[Failure]:
        """Failures of a worker's actors as those of ours."""
        first = self._slices[i].start
        return [replace(each, actors=tuple(first + actor for actor in each.actors)) for each in failures]

    def tasks(self, indices: np.ndarray) -> list[str]:
        return self._facts(indices, "tasks", 0, missing="")

    def goal_texts(self, indices: np.ndarray) -> list[str]:
        return self._facts(indices, "goal_texts", 1, missing="")

    def achieved(self, indices: np.ndarray) -> np.ndarray:
        if not self.spec.achievements:
            return super().achieved(indices)
        return np.array(self._facts(indices, "achieved", 2, missing=np.zeros(len(self.spec.achievements), dtype=bool)))

    def seeds(self, indices: np.ndarray) -> list[int | None]:
        return self._facts(indices, "seeds", 3, missing=None)

    def _facts(self, indices: np.ndarray, method: str, place: int, *, missing: Any) -> list[Any]:
        """What was reported at an episode's end, else what workers answer now (`missing` where they have died)."""
        found = {actor: self._told[actor][place] for actor in indices.tolist() if actor in self._told}
        asked = []
        for i, mine in enumerate(self._slices):
            actors = [a for a in indices.tolist() if a not in found and mine.start <= a < mine.stop]
            if actors:
                asked.append((i, actors, self._ask(i, CALL, pickle.dumps((method, (np.array(actors) - mine.start,))))))
        for i, actors, number in asked:
            answer = self._answer(i, number)
            found |= dict.fromkeys(actors, missing) if answer is None else zip(actors, answer["value"], strict=True)
        return [found[actor] for actor in indices.tolist()]

    def expert(self) -> np.ndarray | None:
        asked = [self._ask(i, CALL, pickle.dumps(("expert", ()))) for i in range(len(self._workers))]
        answers = [self._answer(i, number) for i, number in enumerate(asked)]
        if any(answer is None for answer in answers):  # those who have died tell so in the step
            return np.zeros_like(self._board.action)
        return np.concatenate([answer["value"] for answer in answers if answer is not None])


_BROUGHT = ("reward", "terminated", "truncated", "reset", "attempt_end", "success")


class WorkerEnv(Env):
    """`num_envs` actors of environment `name` in `workers` processes, which make and step them as `make` would here.

    `cores`: of the machine, if others than this process may use. A worker that takes longer than `timeout_seconds` (0:
    there is no limit) for a step or a reset is killed, and its actors fail. The listener hears Waiting. UsageError and
    InputMissing as `make`.
    """

    def __init__(
        self,
        name: str,
        *,
        num_envs: int,
        workers: int,
        seed: int,
        split: Split = "train",
        params: Mapping[str, Any] | SettingsModel | None = None,
        cores: int | None = None,
        timeout_seconds: float = 0.0,
        listener: Listener = silent,
    ) -> None:
        super().__init__(num_envs=num_envs)
        if workers < 1:
            raise UsageError("worker processes are 1 or more", hint="make() steps environments in this process")
        plain = params.model_dump() if isinstance(params, SettingsModel) else dict(params or {})
        workers = min(workers, num_envs)
        sizes, slices = _layout(num_envs, workers, apart=workers >= (cores or available_cores()))
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self._places = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self._memory = nameless_file()
        self._workers: list[Worker] = []
        try:
            for mine in slices:
                order = Order(name=name, seed=seed, split=split, params=plain, sizes=sizes, slices=mine)
                worker = Worker(order, self._memory, timeout_seconds=timeout_seconds, listener=listener)
                self._workers.append(worker)
            introduced = [worker.introduced() for worker in self._workers]
            self.spec, self._has_expert, self._steps_one_by_one = introduced[0]
        except BaseException:
            self.close()
            raise
        shared = boards(self._memory, self.spec.spaces, sizes)
        self._parts = tuple(
            Part(
                self.spec,
                number,
                board,
                [worker for worker in self._workers if number in worker.order.slices],
                self.episodes.slice(place.start, place.stop - place.start),
            )
            for number, (place, board) in enumerate(zip(self._places, shared, strict=True))
        )

    @property
    def parts(self) -> tuple[Env, ...]:
        return self._parts

    @property
    def pids(self) -> list[int]:
        """Of the worker processes."""
        return [worker.pid for worker in self._workers]

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        masks = [None if mask is None else mask[part] for part in self._places]
        return self._together([partial(p.reset, m) for p, m in zip(self._parts, masks, strict=True)], _laid)

    def step(self, actions: np.ndarray) -> StepResult:
        self.begin_step(actions)
        return self.end_step()

    def begin_step(self, actions: np.ndarray) -> None:
        for part, where in zip(self._parts, self._places, strict=True):
            part.begin_step(actions[where])

    def end_step(self) -> StepResult:
        return self._together([part.end_step for part in self._parts], _all_brought)

    def _together(self, calls: Sequence[Callable[[], Any]], joined: Callable[[list[Any]], Any]) -> Any:
        """What every part brings, joined; ActorsFailed after all of them where some fail."""
        brought, failures = [], []
        for call, place in zip(calls, self._places, strict=True):
            try:
                brought.append(call())
            except ActorsFailed as error:
                brought.append(error.brought)
                failures += [replace(f, actors=tuple(place.start + a for a in f.actors)) for f in error.failures]
        if failures:
            raise _failed(failures, joined(brought))
        return joined(brought)

    def tasks(self, indices: np.ndarray) -> list[str]:
        return [self._of(actor, lambda part, i: part.tasks(i)) for actor in indices.tolist()]

    def goal_texts(self, indices: np.ndarray) -> list[str]:
        return [self._of(actor, lambda part, i: part.goal_texts(i)) for actor in indices.tolist()]

    def achieved(self, indices: np.ndarray) -> np.ndarray:
        if not self.spec.achievements:
            return super().achieved(indices)
        return np.stack([self._of(actor, lambda part, i: part.achieved(i)) for actor in indices.tolist()])

    def _of(self, actor: int, ask: Callable[[Env, np.ndarray], Any]) -> Any:
        part, place = next((p, w) for p, w in zip(self._parts, self._places, strict=True) if w.start <= actor < w.stop)
        return ask(part, np.array([actor - place.start]))[0]

    def seeds(self, indices: np.ndarray) -> list[int | None]:
        return [self._of(actor, lambda part, i: part.seeds(i)) for actor in indices.tolist()]

    def play_only(self, tasks: Sequence[str]) -> None:
        request = pickle.dumps(("play_only", (tuple(tasks),)))
        asked = [(w, w.ask(CALL, part, request)) for w in self._workers for part in w.order.slices]
        for worker, number in asked:
            worker.answer(number)
            worker.order = replace(worker.order, play_only=tuple(tasks))

    @property
    def steps_one_by_one(self) -> bool:
        return self._steps_one_by_one

    def try_out(self, longest: float = 0.0) -> Trial | None:
        """Have the first worker try its environments."""
        worker = self._workers[0]
        try:
            return worker.answer(worker.ask(CALL, 0, pickle.dumps(("try_out", (longest,)))))["value"]
        except Died:
            return Trial(death=worker.obituaries[worker.generation])

    @property
    def has_expert(self) -> bool:
        return self._has_expert

    def expert(self) -> np.ndarray | None:
        if not self._has_expert:
            return None
        return np.concatenate([part.expert() for part in self._parts])

    def close(self) -> None:
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.wait()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def _layout(num_envs: int, workers: int, *, apart: bool) -> tuple[tuple[int, ...], list[dict[int, slice]]]:
    """How many actors each part has, and, of each worker, its slice of each part that it has some of. `apart`: no
    worker has some of two. Parts are as large as the workers they have are many.
    """
    crews = [range(workers)]
    if apart and workers > 1:
        crews = [range(0, workers, 2), range(1, workers, 2)]
    elif num_envs >= max(2 * workers, 2):
        crews *= 2
    second = num_envs * len(crews[1]) // sum(map(len, crews)) if len(crews) > 1 else 0
    sizes = (num_envs - second, second)[: len(crews)]
    slices: list[dict[int, slice]] = [{} for _ in range(workers)]
    for part, (size, crew) in enumerate(zip(sizes, crews, strict=True)):
        for place, worker in enumerate(crew):
            slices[worker][part] = slice(size * place // len(crew), size * (place + 1) // len(crew))
    return sizes, slices


def _failed(failures: Sequence[Failure], brought: Any) -> ActorsFailed:
    error = ActorsFailed(failures, brought)
    trace = next((failure.trace for failure in failures if failure.trace), "")
    error.__cause__ = RemoteTraceback(trace) if trace else None
    return error


def _laid(columns: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}


def _all_brought(results: list[StepResult]) -> StepResult:
    rest = {name: np.concatenate([getattr(result, name) for result in results]) for name in _BROUGHT}
    return StepResult(observation=_laid([result.observation for result in results]), **rest)
