"""A worker process: it makes its share of the actors' environments and steps them on request.

A request is one byte for its kind, one for the part of the actors, and perhaps more; each has one answer, in order.
Actions, observations, rewards and flags are in shared memory (`SharedBuffer`), so most answers are empty. The memory
belongs to a file without a name, so that nothing is left of it when the last process that has it open ends, however it
ends. When the parent process ends, however it ends, so does this one.
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
from collections.abc import Sequence
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


STEP, RESET, CALL = b"s", b"r", b"c"


class SharedBuffer:
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

    def rows(self, where: slice) -> SharedBuffer:
        """Select the same memory for some of the actors."""
        return SharedBuffer(
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
        """Copy the results of a step."""
        flags = dict(zip(_FLAGS, self.flags.copy(), strict=True))
        observation = {name: column.copy() for name, column in self.observation.items()}
        return StepResult(observation=observation, reward=self.reward.copy(), **flags)


def map_buffers(file: int, spaces: Spaces, sizes: Sequence[int]) -> list[SharedBuffer]:
    """Map the buffers of parts of `sizes` actors into memory, from `file`, which is extended as needed."""
    names, layout, end = list(spaces.observation), [], 0
    for n in sizes:
        arrays = [
            ((n, *spaces.action.shape), np.dtype(spaces.action.dtype)),
            ((n,), np.dtype(bool)),
            ((n,), np.dtype(np.int64)),
            ((n,), np.dtype(np.float32)),
            ((len(_FLAGS), n), np.dtype(bool)),
        ]
        arrays += 2 * [((n, *space.shape), np.dtype(space.dtype)) for space in spaces.observation.values()]
        for shape, dtype in arrays:
            layout.append((end, shape, dtype))
            end += -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
    length = max(end, 1)
    if os.fstat(file).st_size < length:
        os.ftruncate(file, length)
    memory, found = mmap.mmap(file, length), []
    mapped = [np.frombuffer(memory, dtype, math.prod(shape), at).reshape(shape) for at, shape, dtype in layout]
    each = len(mapped) // len(sizes)
    for first in range(0, len(mapped), each):
        own = mapped[first : first + each]
        middle = 5 + len(names)
        observation, begun = (dict(zip(names, part, strict=True)) for part in (own[5:middle], own[middle:]))
        action, mask, current, reward, flags = own[:5]
        found.append(SharedBuffer(action, mask, current, reward, flags, observation, begun))
    return found


def open_unnamed_file() -> int:
    """Open an empty file and return its descriptor: in memory if the system supports it, else in the temporary
    directory.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("amago", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
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
        """Where its slices are among all actors."""
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
    order: WorkerSpec = incoming.recv()
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
    shared = map_buffers(memory, envs[0].spec.spaces, order.sizes)
    own = {part: (env, shared[part].rows(mine)) for env, (part, mine) in zip(envs, order.slices.items(), strict=True)}
    while True:
        request = incoming.recv_bytes()
        kind, (env, buffer) = request[:1], own[request[1]]
        try:
            if kind == STEP:
                answer = _step(env, buffer)
            elif kind == RESET:
                env.episodes.current[:] = buffer.current
                answer = _begin(env, buffer, buffer.mask.copy())
            else:
                method, arguments = pickle.loads(request[2:])
                answer = {"value": getattr(env, method)(*arguments)}
        except Exception as error:
            answer = {"error": pack_error(error, f"environment '{order.name}' failed: ")}
        outgoing.send_bytes(pickle.dumps(answer) if answer else b"")


def _step(env: Env, buffer: SharedBuffer) -> dict[str, Any]:
    """Step all actors; those whose episode ends begin the next one at once, so that no later request waits for it."""
    answer: dict[str, Any] = {}
    result, error = try_call(env, lambda: env.step(buffer.action), blame=StageFailed)
    failed = np.zeros(env.num_envs, dtype=bool)
    if error is not None:
        answer["failures"] = error.failures
        failed[[actor for failure in error.failures for actor in failure.actors]] = True
    if result is None:
        return answer
    buffer.put(result)
    over = (result.terminated | result.truncated) & ~failed & np.isfinite(result.reward)
    if over.any():
        ended = np.flatnonzero(over)
        facts = env.tasks(ended), env.goal_texts(ended), env.achieved(ended), env.seeds(ended)
        answer["ended"] = ended.tolist(), *facts
        answer |= _begin(env, buffer, over)
    return answer


def _begin(env: Env, buffer: SharedBuffer, mask: np.ndarray) -> dict[str, Any]:
    observation, error = try_call(env, lambda: env.reset(mask), mask, blame=StageFailed)
    for name, column in buffer.begun.items() if observation is not None else ():
        column[mask] = observation[name][mask]
    return {} if error is None else {"begin failures": error.failures}
