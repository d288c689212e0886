"""Environments in worker processes: N actors as one `Env`, each worker stepping a slice of them.

What is played does not depend on the number of workers. The actors are two parts: one can be stepped while actions are
chosen for the other. With at least as many workers as cores each part has workers of its own, and goes on as soon as
these have answered; they wait for this process anyway. With more cores every worker has a slice of both parts, so that
none waits. A worker that dies loses the episodes of its actors, which fail; it is replaced when they are reset.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pipelines.config.base import SettingsModel
from pipelines.config.host import count_cores
from pipelines.envs.env import (
    ActorsFailed,
    Env,
    EpisodeCounter,
    StepResult,
    Trial,
)
from pipelines.envs.make import Split
from pipelines.envs.process import RESULT_FIELDS, ActorSlice, Worker, WorkerDied, actors_failed
from pipelines.envs.worker import CALL, Order, boards, nameless_file
from pipelines.errors import UsageError
from pipelines.events import Listener, silent


class WorkerEnv(Env):
    """`num_envs` actors of environment `name` in `workers` processes, which make and step them as `make` would here.

    `cores`: of the machine, if not those available to this process. `offset`, `total`: as in `EpisodeCounter`. A worker
    that takes longer than `timeout_seconds` (0: no limit) for a step or a reset is killed, and its actors fail;
    the listener receives Waiting. UsageError and InputMissing as `make`.
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
        offset: int = 0,
        total: int = 0,
        listener: Listener = silent,
    ) -> None:
        super().__init__(num_envs=num_envs)
        self.episodes = EpisodeCounter(num_envs=num_envs, total=total, offset=offset)
        if workers < 1:
            raise UsageError("worker processes are 1 or more", hint="make() steps environments in this process")
        plain = params.model_dump() if isinstance(params, SettingsModel) else dict(params or {})
        workers = min(workers, num_envs)
        sizes, slices = _layout(num_envs, workers, apart=workers >= (cores or count_cores()))
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self._places = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self._memory = nameless_file()
        self._workers: list[Worker] = []
        try:
            for mine in slices:
                order = Order(
                    name=name,
                    seed=seed,
                    split=split,
                    params=plain,
                    sizes=sizes,
                    slices=mine,
                    offset=offset,
                    total=self.episodes.total,
                )
                worker = Worker(order, self._memory, timeout_seconds=timeout_seconds, listener=listener)
                self._workers.append(worker)
            introduced = [worker.introduced() for worker in self._workers]
            self.spec, self._has_expert, self._steps_one_by_one = introduced[0]
        except BaseException:
            self.close()
            raise
        shared = boards(self._memory, self.spec.spaces, sizes)
        self._parts = tuple(
            ActorSlice(
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
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        masks = [None if mask is None else mask[part] for part in self._places]
        return self._together([partial(p.reset, m) for p, m in zip(self._parts, masks, strict=True)], _joined_columns)

    def step(self, actions: np.ndarray) -> StepResult:
        self.begin_step(actions)
        return self.end_step()

    def begin_step(self, actions: np.ndarray) -> None:
        for part, where in zip(self._parts, self._places, strict=True):
            part.begin_step(actions[where])

    def end_step(self) -> StepResult:
        return self._together([part.end_step for part in self._parts], _joined_results)

    def _together(self, calls: Sequence[Callable[[], Any]], joined: Callable[[list[Any]], Any]) -> Any:
        """Call every part and join the results; ActorsFailed once all have been called, if some fail."""
        brought, failures = [], []
        for call, place in zip(calls, self._places, strict=True):
            try:
                brought.append(call())
            except ActorsFailed as error:
                brought.append(error.brought)
                failures += [replace(f, actors=tuple(place.start + a for a in f.actors)) for f in error.failures]
        if failures:
            raise actors_failed(failures, joined(brought))
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
        self._command("play_only", tuple(tasks), play_only=tuple(tasks))

    def play_evenly(self) -> None:
        self._command("play_evenly", play_evenly=True)

    def _command(self, method: str, *arguments: Any, **ordered: Any) -> None:
        """Call a method of every environment, now and, as `ordered`, whenever a worker makes it again."""
        request = pickle.dumps((method, arguments))
        asked = [(w, w.ask(CALL, part, request)) for w in self._workers for part in w.order.slices]
        for worker, number in asked:
            worker.answer(number)
            worker.order = replace(worker.order, **ordered)

    @property
    def steps_one_by_one(self) -> bool:
        return self._steps_one_by_one

    def try_out(self, longest: float = 0.0) -> Trial | None:
        """Have the first worker try its environments."""
        worker = self._workers[0]
        try:
            return worker.answer(worker.ask(CALL, 0, pickle.dumps(("try_out", (longest,)))))["value"]
        except WorkerDied:
            return Trial(death=worker.exits[worker.generation])

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
    """Return the number of actors of each part, and each worker's slice of every part that it serves. `apart`: each
    worker serves one part. Parts are sized in proportion to their workers.
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


def _joined_columns(columns: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}


def _joined_results(results: list[StepResult]) -> StepResult:
    rest = {name: np.concatenate([getattr(result, name) for result in results]) for name in RESULT_FIELDS}
    return StepResult(observation=_joined_columns([result.observation for result in results]), **rest)
