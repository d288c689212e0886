"""A worker process: it makes its share of the actors' environments and steps them on request.

A request is one byte for its kind, one for the part of the actors, and perhaps more; each has one answer, in order.
Actions, observations, rewards and flags are in shared memory (`Board`), so most answers are empty. The memory belongs
to a file without a name, so that nothing is left of it when the last process that has it open ends, however it ends.
When the parent process ends, however it ends, so does this one.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pipelines.envs.env import Env, EpisodeCounter, StepResult, try_call
from pipelines.envs.make import Split, make
from pipelines.errors import StageFailed
from pipelines.lake.spaces import Spaces
from pipelines.processes import end_with_parent, pack_error

_FLAGS = ("terminated", "truncated", "reset", "attempt_end", "success")
_ALIGNED = 64  # bytes: no two processes write to one line of a cache


class Board:
    """Arrays of `num_envs` actors; `rows` gives a worker its part.

    `mask`: actors that begin an episode, after the one whose number is in `current`; `observation`, `reward` and
    `flags` (5, N): results of a step; `begun`: first observations of the actors that began an episode.
    """

    def __init__(
        self,
        action: np.ndarray,
        mask: np.ndarray,
        current: np.ndarray,
        reward: np.ndarray,
        flags: np.ndarray,
        observation: dict[str, np.ndarray],
        begun: dict[str, np.ndarray],
    ) -> None:
        self.action, self.mask, self.current = action, mask, current
        self.reward, self.flags = reward, flags
        self.observation, self.begun = observation, begun

    def rows(self, where: slice) -> Board:
        """Return the same memory for some of the actors."""
        return Board(
            self.action[where],
            self.mask[where],
            self.current[where],
            self.reward[where],
            self.flags[:, where],
            {name: column[where] for name, column in self.observation.items()},
            {name: column[where] for name, column in self.begun.items()},
        )

    def put(self, result: StepResult) -> None:
        """Write the results of a step."""
        for name, column in self.observation.items():
            column[:] = result.observation[name]
        self.reward[:] = result.reward
        for flag, name in zip(self.flags, _FLAGS, strict=True):
            flag[:] = getattr(result, name)

    def take(self) -> StepResult:
        """Return a copy of the results of a step."""
        flags = dict(zip(_FLAGS, self.flags.copy(), strict=True))
        observation = {name: column.copy() for name, column in self.observation.items()}
        return StepResult(observation=observation, reward=self.reward.copy(), **flags)


def boards(file: int, spaces: Spaces, sizes: Sequence[int]) -> list[Board]:
    """Return the boards of parts of `sizes` actors in `file`, which is extended as needed."""
    length = _end([piece for size in sizes for piece in _pieces(spaces, size)])
    if os.fstat(file).st_size < length:
        os.ftruncate(file, length)
    memory, place, found = mmap.mmap(file, length), 0, []
    for size in sizes:
        arrays = []
        for shape, dtype in _pieces(spaces, size):
            count = math.prod(shape)
            arrays.append(np.frombuffer(memory, dtype, count, place).reshape(shape))
            place = _after(place, shape, dtype)
        names = list(spaces.observation)
        first, second = arrays[5 : 5 + len(names)], arrays[5 + len(names) :]
        observation, begun = dict(zip(names, first, strict=True)), dict(zip(names, second, strict=True))
        action, mask, current, reward, flags = arrays[:5]
        found.append(Board(action, mask, current, reward, flags, observation, begun))
    return found


def nameless_file() -> int:
    """Return the descriptor of an empty file, in memory if the system supports it, else in the temporary directory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("amago", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _pieces(spaces: Spaces, n: int) -> Iterator[tuple[tuple[int, ...], np.dtype]]:
    yield (n, *spaces.action.shape), np.dtype(spaces.action.dtype)
    yield (n,), np.dtype(bool)
    yield (n,), np.dtype(np.int64)
    yield (n,), np.dtype(np.float32)
    yield (len(_FLAGS), n), np.dtype(bool)
    for _ in range(2):
        for space in spaces.observation.values():
            yield (n, *space.shape), np.dtype(space.dtype)


def _after(place: int, shape: tuple[int, ...], dtype: np.dtype) -> int:
    return place + -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED


def _end(pieces: Sequence[tuple[tuple[int, ...], np.dtype]]) -> int:
    place = 0
    for shape, dtype in pieces:
        place = _after(place, shape, dtype)
    return max(place, 1)


STEP, RESET, CALL = b"s", b"r", b"c"


@dataclass(frozen=True, kw_only=True)
class Order:
    """The environments that a worker makes: slices of some parts of the actors, by number; `sizes` are those of all
    parts. `offset` and `total` as in `EpisodeCounter`.
    """

    name: str
    seed: int
    split: Split
    params: dict[str, Any]
    sizes: tuple[int, ...]
    slices: dict[int, slice]
    offset: int = 0
    total: int = 0
    play_only: tuple[str, ...] = ()
    play_evenly: bool = False
    attempts: int = 1

    @property
    def places(self) -> list[slice]:
        """The places of its slices among all actors."""
        firsts = {part: sum(self.sizes[:part]) for part in self.slices}
        return [slice(firsts[part] + mine.start, firsts[part] + mine.stop) for part, mine in self.slices.items()]


def main(requests: int, answers: int, memory: int) -> None:
    """Serve the process at the other ends of the pipes `requests` and `answers`; all three are file descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what environments print must not get into a result
    end_with_parent()
    incoming, outgoing = Connection(requests, writable=False), Connection(answers, readable=False)
    envs: list[Env] = []
    try:
        with contextlib.suppress(EOFError, ConnectionError):
            _serve(incoming, outgoing, memory, envs)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    for env in envs:
        env.close()
    os._exit(0)  # at once: the parent is waiting


def _serve(incoming: Connection, outgoing: Connection, memory: int, envs: list[Env]) -> None:
    order: Order = incoming.recv()
    try:
        for mine in order.places:
            count = mine.stop - mine.start
            env = make(
                order.name,
                num_envs=count,
                seed=order.seed,
                split=order.split,
                params=order.params,
                attempts=order.attempts,
            )
            env.episodes = EpisodeCounter(num_envs=count, total=order.total, offset=order.offset + mine.start)
            envs.append(env)
        for env in envs:
            if order.play_evenly:
                env.play_evenly()
            if order.play_only:
                env.play_only(order.play_only)
    except Exception as error:
        outgoing.send(pack_error(error, f"environment '{order.name}' failed: "))
        return
    outgoing.send((envs[0].spec, envs[0].has_expert, envs[0].steps_one_by_one))
    shared = boards(memory, envs[0].spec.spaces, order.sizes)
    own = {part: (env, shared[part].rows(mine)) for env, (part, mine) in zip(envs, order.slices.items(), strict=True)}
    while True:
        request = incoming.recv_bytes()
        env, board = own[request[1]]
        try:
            answer = _answer(env, board, request)
        except Exception as error:
            answer = {"error": pack_error(error, f"environment '{order.name}' failed: ")}
        outgoing.send_bytes(pickle.dumps(answer) if answer else b"")


def _answer(env: Env, board: Board, request: bytes) -> dict[str, Any]:
    what = request[:1]
    if what == STEP:
        return _step(env, board)
    if what == RESET:
        env.episodes.current[:] = board.current
        return _begin(env, board, board.mask.copy())
    method, arguments = pickle.loads(request[2:])
    return {"value": getattr(env, method)(*arguments)}


def _step(env: Env, board: Board) -> dict[str, Any]:
    """Step all actors; those whose episode ends begin the next one at once, so that no later request waits for it."""
    answer: dict[str, Any] = {}
    result, error = try_call(env, lambda: env.step(board.action), blame=StageFailed)
    failed = np.zeros(env.num_envs, dtype=bool)
    if error is not None:
        answer["failures"] = error.failures
        failed[[actor for failure in error.failures for actor in failure.actors]] = True
    if result is None:
        return answer
    board.put(result)
    over = (result.terminated | result.truncated) & ~failed & np.isfinite(result.reward)
    if over.any():
        ended = np.flatnonzero(over)
        facts = env.tasks(ended), env.goal_texts(ended), env.achieved(ended), env.seeds(ended)
        answer["ended"] = ended.tolist(), *facts
        answer |= _begin(env, board, over)
    return answer


def _begin(env: Env, board: Board, mask: np.ndarray) -> dict[str, Any]:
    observation, error = try_call(env, lambda: env.reset(mask), mask, blame=StageFailed)
    for name, column in board.begun.items() if observation is not None else ():
        column[mask] = observation[name][mask]
    return {} if error is None else {"begin failures": error.failures}
