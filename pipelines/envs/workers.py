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
import select
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pipelines.config import host
from pipelines.config.base import SettingsModel
from pipelines.config.host import count_cores
from pipelines.envs.env import ActorsFailed, Env, EnvFailure, EnvSpec, EpisodeCounter, StepResult, Trial
from pipelines.envs.make import Split
from pipelines.envs.worker import CALL, RESET, STEP, SharedBuffer, WorkerSpec, map_buffers, open_unnamed_file
from pipelines.errors import StageFailed, UsageError
from pipelines.events import Listener, Waiting, silent
from pipelines.processes import PackedError, RemoteTraceback, describe_exit, end_process, start_python

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_RESULT_FIELDS = ("reward", "terminated", "truncated", "reset", "attempt_end", "success")
_NEVER = -1
_LOST = 0  # no request has this number
_CLOSING_SECONDS = 5.0
_EARLY = 100  # requests
_MOMENT = 1.0  # seconds between two looks at how long an answer takes


class WorkerDied(Exception):
    """A worker process has ended."""


class Worker:
    """A process and its pending requests. A dead one can be replaced: `generation` counts the processes, `exits` says
    how each ended, `reported_exits` which of these were reported. `memory` is the file of its buffers.

    A process that takes longer than `timeout_seconds` (0: there is no limit) for an answer is killed; the listener
    receives Waiting while it takes long. `early_ends`: how many consecutive processes ended within a hundred requests.
    """

    def __init__(
        self, order: WorkerSpec, memory: int, *, timeout_seconds: float = 0.0, listener: Listener = silent
    ) -> None:
        self.order, self._memory = order, memory
        self._timeout, self._listener = timeout_seconds, listener
        self.early_ends = 0
        self.generation, self.dead = 0, False
        self.exits: dict[int, str] = {}
        self.reported_exits: set[int] = set()
        self._start()

    def _start(self) -> None:
        # Two pipes: with a socket, a reader is also woken when its own answer is read.
        theirs_in, ours_out = os.pipe()
        self._requests = Connection(ours_out, readable=False)
        ours_in, theirs_out = os.pipe()
        self._replies = Connection(ours_in, writable=False)
        try:
            self._process = start_python(
                f"from pipelines.envs.worker import main; main({theirs_in}, {theirs_out}, {self._memory})",
                descriptors=(theirs_in, theirs_out, self._memory),
                environment=dict.fromkeys(_ONE_THREAD, "1") | host.strip_launcher(),
            )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._asked: deque[int] = deque()
        self._answers: dict[int, dict[str, Any]] = {}
        self._last = 0
        self._is_late = False
        self._since = time.monotonic()
        self._readable = select.poll()
        self._readable.register(self._replies, select.POLLIN)
        self._requests.send(self.order)

    @property
    def actors(self) -> str:
        """The actors whose environments it runs, in words."""
        return f"actors {' and '.join(f'{place.start} to {place.stop - 1}' for place in self.order.places)}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that is readable once it has answered, or died."""
        return self._replies.fileno()

    def introduce(self) -> tuple[EnvSpec, bool, bool]:
        """Wait until the environments are made; return their spec, whether they have an expert, and whether they step
        one by one. Raises the error of making them.
        """
        self._wait(f"environment '{self.order.name}' to be made")
        try:
            said = self._replies.recv()
        except (EOFError, ConnectionError):
            self._record_exit()
            how = self.exits[self.generation]
            raise StageFailed(f"environment '{self.order.name}' cannot be made: {how}") from None
        if isinstance(said, PackedError):
            raise said.unpack()
        return said

    def ask(self, what: bytes, part: int, rest: bytes = b"") -> int:
        """Send a request; return its number. WorkerDied if the process has ended."""
        if self.dead:
            raise WorkerDied
        try:
            self._requests.send_bytes(what + bytes([part]) + rest)
        except ConnectionError:
            raise self._record_exit() from None
        self._last += 1
        if not self._asked:
            self._since = time.monotonic()
        self._asked.append(self._last)
        return self._last

    def answer(self, number: int) -> dict[str, Any]:
        """Wait for the answer to a request. Raises the worker's error, or WorkerDied."""
        while number not in self._answers:
            if self.dead:
                raise WorkerDied
            try:
                self._wait()
                data = self._replies.recv_bytes()
            except (EOFError, ConnectionError):
                raise self._record_exit() from None
            self._since = time.monotonic()
            self._answers[self._asked.popleft()] = pickle.loads(data) if data else {}
        found = self._answers.pop(number)
        if "error" in found:
            raise found["error"].unpack()
        return found

    def _wait(self, what: str = "") -> None:
        while not self._readable.poll(1e3 * _MOMENT):
            if what:
                self._listener(Waiting(what=what, stoppable=False))
            else:
                self.on_wait()

    def on_wait(self) -> None:
        """Report that an answer takes long, and kill the process when it takes too long."""
        if self.dead or not self._asked:
            return
        text = f"environment '{self.order.name}', {self.actors} (worker process {self.pid})"
        self._listener(Waiting(what=text, stoppable=False))
        if self._timeout and time.monotonic() - self._since > self._timeout:
            self._is_late = True
            self._process.kill()

    def replace(self) -> None:
        """Start a new process in the place of the dead one; `introduce` comes next."""
        self.dead, self.generation = False, self.generation + 1
        self._start()

    def _record_exit(self) -> WorkerDied:
        self.early_ends = self.early_ends + 1 if self._last < _EARLY else 0
        self._requests.close()
        self._replies.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSING_SECONDS)
        code = self._process.returncode
        if self._is_late:
            how = f"took longer than {self._timeout:g} s for a step or a reset"
        elif code is None:
            how = "has hung up"
            self._process.kill()
            self._process.wait()
        else:
            how = describe_exit(code)
        self.dead, self.exits[self.generation] = True, f"worker process {self.pid} {how}"
        return WorkerDied()

    def hang_up(self) -> None:
        """Have the process close its environments and end."""
        self._requests.close()
        self._replies.close()

    def wait(self) -> None:
        """Wait until the process has ended; call `hang_up` first."""
        end_process(self._process, _CLOSING_SECONDS)


class ActorSlice(Env):
    """Consecutive actors, shared out among `workers`. Made by `WorkerEnv`."""

    def __init__(
        self, spec: EnvSpec, number: int, buffer: SharedBuffer, workers: Sequence[Worker], episodes: EpisodeCounter
    ) -> None:
        super().__init__(num_envs=episodes.num_envs)
        self.spec, self.episodes = spec, episodes
        self._number, self._buffer, self._workers = number, buffer, workers
        self._slices = [worker.order.slices[number] for worker in workers]
        self._apart = all(len(worker.order.slices) == 1 for worker in workers)
        self._lives = [_NEVER] * len(workers)  # generation of each worker when our actors were reset
        self._asked: list[int] | None = None
        self._ready = np.zeros(self.num_envs, dtype=bool)  # have begun the episode that is yet to be asked for
        self._not_begun: list[EnvFailure] = []
        # Task, goal, achievements and seed of an episode that has ended.
        self._reported: dict[int, tuple[str, str, np.ndarray, int | None]] = {}
        self._seen = {name: np.zeros_like(column) for name, column in buffer.begun.items()}

    def step(self, actions: np.ndarray) -> StepResult:
        self.begin_step(actions)
        return self.end_step()

    def begin_step(self, actions: np.ndarray) -> None:
        self._buffer.action[:] = actions
        self._asked = [self._ask(i, STEP) for i in range(len(self._workers))]

    @property
    def waits_on(self) -> list[int]:
        if self._asked is None or not self._apart:  # of several parts, any may be the one that is answered
            return []
        return [w.fileno() for w, number in zip(self._workers, self._asked, strict=True) if number != _LOST]

    def on_wait(self) -> None:
        for worker in self._workers:
            worker.on_wait()

    def end_step(self) -> StepResult:
        assert self._asked is not None, "begin_step comes first"
        asked, self._asked = self._asked, None
        failures: list[EnvFailure] = []
        lost = np.zeros(self.num_envs, dtype=bool)
        for i, number in enumerate(asked):
            answer = self._answer(i, number)
            if answer is None:
                lost[self._slices[i]] = True
                failures.append(self._describe_loss(i, lost))
                continue
            failures += self._renumber(i, answer.get("failures", ()))
            if "ended" in answer:
                ended, *facts = answer["ended"]
                actors = [self._slices[i].start + actor for actor in ended]
                self._ready[actors] = True
                self._reported.update(zip(actors, zip(*facts, strict=True), strict=True))
                self._not_begun += self._renumber(i, answer.get("begin failures", ()))
        result = self._buffer.take()
        self._seen = result.observation
        if failures:
            if lost.any():  # whose rows are of the step before
                for array in (*result.observation.values(), *(getattr(result, name) for name in _RESULT_FIELDS)):
                    array[lost] = 0
            raise _join_failures(failures, result)
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
            self._reported.pop(actor, None)
        columns = {name: column.copy() for name, column in self._seen.items()}
        for name, column in columns.items():
            column[mask] = self._buffer.begun[name][mask]
        self._seen = columns
        if failures:
            raise _join_failures(failures, columns)
        return columns

    def _begin(self, waiting: np.ndarray) -> list[EnvFailure]:
        """Have workers begin episodes for the actors in `waiting`."""
        self._buffer.mask[:] = waiting
        self._buffer.current[:] = self.episodes.current + self.episodes.total * self._ready
        asked = {}
        dead = [worker for i, worker in enumerate(self._workers) if worker.dead and self._begins(i, waiting)]
        for worker in dead:  # all of them before any is waited for
            worker.replace()
        for worker in dead:
            worker.introduce()
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
                failures.append(self._describe_loss(i, lost))
            else:
                failures += self._renumber(i, answer.get("begin failures", ()))
        return failures

    def _begins(self, i: int, waiting: np.ndarray) -> bool:
        """Whether all of our episodes in worker `i` begin with those in `waiting`."""
        mine = waiting[self._slices[i]]
        return bool(mine.any() and (mine.all() or self._lives[i] == _NEVER))

    def _ask(self, i: int, what: bytes, rest: bytes = b"") -> int:
        """Send a request to worker `i`; _LOST if it has died since our actors were reset."""
        if self._lives[i] == self._workers[i].generation:
            with contextlib.suppress(WorkerDied):
                return self._workers[i].ask(what, self._number, rest)
        return _LOST

    def _answer(self, i: int, number: int) -> dict[str, Any] | None:
        """Return the worker's answer; None if it has died."""
        if number != _LOST and self._lives[i] == self._workers[i].generation:
            with contextlib.suppress(WorkerDied):
                return self._workers[i].answer(number)
        return None

    def _describe_loss(self, i: int, whose: np.ndarray) -> EnvFailure:
        """Describe the death of worker `i` for our actors in `whose`."""
        worker, mine, life = self._workers[i], self._slices[i], self._lives[i]
        reported = life in worker.reported_exits
        worker.reported_exits.add(life)
        actors = tuple((np.flatnonzero(whose[mine]) + mine.start).tolist())
        text = f"environment '{self.spec.name}' is gone: {worker.exits[life]}, which played {worker.actors}"
        return EnvFailure(actors=actors, message=text, reported=reported, in_a_row=worker.early_ends)

    def _renumber(self, i: int, failures: Sequence[EnvFailure]) -> list[EnvFailure]:
        """Renumber the failures of worker `i`'s actors as ours."""
        first = self._slices[i].start
        return [replace(each, actors=tuple(first + actor for actor in each.actors)) for each in failures]

    def tasks(self, indices: np.ndarray) -> list[str]:
        return self._read_facts(indices, "tasks", 0, missing="")

    def goal_texts(self, indices: np.ndarray) -> list[str]:
        return self._read_facts(indices, "goal_texts", 1, missing="")

    def achieved(self, indices: np.ndarray) -> np.ndarray:
        if not self.spec.achievements:
            return super().achieved(indices)
        return np.array(
            self._read_facts(indices, "achieved", 2, missing=np.zeros(len(self.spec.achievements), dtype=bool))
        )

    def seeds(self, indices: np.ndarray) -> list[int | None]:
        return self._read_facts(indices, "seeds", 3, missing=None)

    def _read_facts(self, indices: np.ndarray, method: str, place: int, *, missing: Any) -> list[Any]:
        """Read the facts that were reported at an episode's end; otherwise ask the workers (`missing` if they have
        died).
        """
        found = {actor: self._reported[actor][place] for actor in indices.tolist() if actor in self._reported}
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
        if any(answer is None for answer in answers):  # reported by the next step
            return np.zeros_like(self._buffer.action)
        return np.concatenate([answer["value"] for answer in answers if answer is not None])


def _join_failures(failures: Sequence[EnvFailure], brought: Any) -> ActorsFailed:
    """Make one error of `failures`, with the first traceback as its cause."""
    error = ActorsFailed(failures, brought)
    trace = next((failure.trace for failure in failures if failure.trace), "")
    error.__cause__ = RemoteTraceback(trace) if trace else None
    return error


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
        attempts: int = 1,
        listener: Listener = silent,
    ) -> None:
        super().__init__(num_envs=num_envs)
        self.episodes = EpisodeCounter(num_envs=num_envs, total=total, offset=offset)
        if workers < 1:
            raise UsageError("worker processes are 1 or more", hint="make() steps environments in this process")
        plain = params.model_dump() if isinstance(params, SettingsModel) else dict(params or {})
        workers = min(workers, num_envs)
        sizes, slices = _assign_actors(num_envs, workers, apart=workers >= (cores or count_cores()))
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self._places = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self._memory = open_unnamed_file()
        self._workers: list[Worker] = []
        try:
            for mine in slices:
                order = WorkerSpec(
                    name=name,
                    seed=seed,
                    split=split,
                    params=plain,
                    sizes=sizes,
                    slices=mine,
                    offset=offset,
                    total=self.episodes.total,
                    attempts=attempts,
                )
                worker = Worker(order, self._memory, timeout_seconds=timeout_seconds, listener=listener)
                self._workers.append(worker)
            introduced = [worker.introduce() for worker in self._workers]
            self.spec, self._has_expert, self._steps_one_by_one = introduced[0]
        except BaseException:
            self.close()
            raise
        shared = map_buffers(self._memory, self.spec.spaces, sizes)
        self._parts = tuple(
            ActorSlice(
                self.spec,
                number,
                buffer,
                [worker for worker in self._workers if number in worker.order.slices],
                self.episodes.slice(place.start, place.stop - place.start),
            )
            for number, (place, buffer) in enumerate(zip(self._places, shared, strict=True))
        )

    @property
    def parts(self) -> tuple[Env, ...]:
        return self._parts

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, in the order of their numbers."""
        return [worker.pid for worker in self._workers]

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        masks = [None if mask is None else mask[part] for part in self._places]
        return self._call_all(
            [partial(p.reset, m) for p, m in zip(self._parts, masks, strict=True)], self._join_columns
        )

    def step(self, actions: np.ndarray) -> StepResult:
        self.begin_step(actions)
        return self.end_step()

    def begin_step(self, actions: np.ndarray) -> None:
        for part, where in zip(self._parts, self._places, strict=True):
            part.begin_step(actions[where])

    def end_step(self) -> StepResult:
        return self._call_all([part.end_step for part in self._parts], self._join_results)

    def _join_columns(self, columns: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}

    def _join_results(self, results: list[StepResult]) -> StepResult:
        rest = {name: np.concatenate([getattr(result, name) for result in results]) for name in _RESULT_FIELDS}
        return StepResult(observation=self._join_columns([result.observation for result in results]), **rest)

    def _call_all(self, calls: Sequence[Callable[[], Any]], join: Callable[[list[Any]], Any]) -> Any:
        """Call every part and join the results; ActorsFailed once all have been called, if some fail."""
        brought, failures = [], []
        for call, place in zip(calls, self._places, strict=True):
            try:
                brought.append(call())
            except ActorsFailed as error:
                brought.append(error.brought)
                failures += [replace(f, actors=tuple(place.start + a for a in f.actors)) for f in error.failures]
        if failures:
            raise _join_failures(failures, join(brought))
        return join(brought)

    def tasks(self, indices: np.ndarray) -> list[str]:
        return [self._ask_part(actor, lambda part, i: part.tasks(i)) for actor in indices.tolist()]

    def goal_texts(self, indices: np.ndarray) -> list[str]:
        return [self._ask_part(actor, lambda part, i: part.goal_texts(i)) for actor in indices.tolist()]

    def achieved(self, indices: np.ndarray) -> np.ndarray:
        if not self.spec.achievements:
            return super().achieved(indices)
        return np.stack([self._ask_part(actor, lambda part, i: part.achieved(i)) for actor in indices.tolist()])

    def _ask_part(self, actor: int, ask: Callable[[Env, np.ndarray], Any]) -> Any:
        part, place = next((p, w) for p, w in zip(self._parts, self._places, strict=True) if w.start <= actor < w.stop)
        return ask(part, np.array([actor - place.start]))[0]

    def seeds(self, indices: np.ndarray) -> list[int | None]:
        return [self._ask_part(actor, lambda part, i: part.seeds(i)) for actor in indices.tolist()]

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


def _assign_actors(num_envs: int, workers: int, *, apart: bool) -> tuple[tuple[int, ...], list[dict[int, slice]]]:
    """Share the actors out: the number of each part, and each worker's slice of every part that it serves. `apart`:
    each worker serves one part. Parts are sized in proportion to their workers.
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
