"""A worker process: it makes its share of the actors' environments and steps them when told.

A request is one byte that says what, one that says for which part of the actors, and perhaps more; each has one answer,
in order. Arrays are in shared memory (`board`), answers hold what is not an array, and nothing most of the time. When
the process that asks ends, however it ends, so does this one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pipelines.config.parent import end_with_parent
from pipelines.envs.board import Board, boards
from pipelines.envs.env import ActorsFailed, Env, EpisodeCounter, Failure
from pipelines.envs.make import Split, make
from pipelines.errors import AmagoError, StageFailed

STEP, RESET, CALL = b"s", b"r", b"c"


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a worker is to make: slices of some parts of the actors, by their number; `sizes` are those of all parts."""

    name: str
    seed: int
    split: Split
    params: dict[str, Any]
    sizes: tuple[int, ...]
    slices: dict[int, slice]
    play_only: tuple[str, ...] = ()

    @property
    def places(self) -> list[slice]:
        """Where its slices are among all actors."""
        firsts = {part: sum(self.sizes[:part]) for part in self.slices}
        return [slice(firsts[part] + mine.start, firsts[part] + mine.stop) for part, mine in self.slices.items()]


def main(requests: int, answers: int, memory: int) -> None:
    """Serve whoever holds the other ends of the pipes `requests` and `answers` (descriptors, all)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what environments print must not get into a result
    end_with_parent()
    asked, told = Connection(requests, writable=False), Connection(answers, readable=False)
    envs: list[Env] = []
    try:
        with contextlib.suppress(EOFError, ConnectionError):
            _serve(asked, told, memory, envs)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    for env in envs:
        env.close()
    os._exit(0)  # at once: whoever hung up waits


def _serve(asked: Connection, told: Connection, memory: int, envs: list[Env]) -> None:
    order: Order = asked.recv()
    try:
        for mine in order.places:
            count = mine.stop - mine.start
            env = make(order.name, num_envs=count, seed=order.seed, split=order.split, params=order.params)
            env.episodes = EpisodeCounter(num_envs=count, total=sum(order.sizes), offset=mine.start)
            envs.append(env)
        for env in envs if order.play_only else ():
            env.play_only(order.play_only)
    except Exception as error:
        told.send(refusal(error, order.name))
        return
    told.send((envs[0].spec, envs[0].has_expert))
    shared = boards(memory, envs[0].spec.spaces, order.sizes)
    own = {part: (env, shared[part].rows(mine)) for env, (part, mine) in zip(envs, order.slices.items(), strict=True)}
    while True:
        request = asked.recv_bytes()
        env, board = own[request[1]]
        try:
            answer = _answer(env, board, request)
        except Exception as error:
            answer = {"error": refusal(error, order.name)}
        told.send_bytes(pickle.dumps(answer) if answer else b"")


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
    """Step everybody; whoever's episode ends begins the next at once, so that nobody waits for it later."""
    answer: dict[str, Any] = {}
    result, failures = tried(env, lambda: env.step(board.action))
    failed = np.zeros(env.num_envs, dtype=bool)
    if failures:
        answer["failures"] = failures
        failed[[actor for failure in failures for actor in failure.actors]] = True
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
    observation, failures = tried(env, lambda: env.reset(mask), mask)
    for name, column in board.begun.items() if observation is not None else ():
        column[mask] = observation[name][mask]
    return {"begin failures": failures} if failures else {}


def tried(env: Env, call: Callable[[], Any], mask: np.ndarray | None = None) -> tuple[Any, tuple[Failure, ...]]:
    """What `call` brings and what failed in it: an exception is a failure of all actors (in `mask`)."""
    try:
        return call(), ()
    except ActorsFailed as error:
        return error.brought, error.failures
    except Exception as error:
        if isinstance(error, AmagoError) and not isinstance(error, StageFailed):
            raise  # not a fault of the environment
        everybody = tuple(range(env.num_envs)) if mask is None else tuple(np.flatnonzero(mask).tolist())
        said = error.message if isinstance(error, AmagoError) else f"{type(error).__name__}: {error}"
        message = f"environment '{env.spec.name}' failed: {said}"
        return None, (Failure(actors=everybody, message=message, trace="".join(traceback.format_exception(error))),)


def refusal(error: Exception, name: str) -> AmagoError:
    """`error` as one that can be sent and raised elsewhere, with its traceback as its cause."""
    sent = error
    if not isinstance(error, AmagoError):
        sent = StageFailed(f"environment '{name}' failed: {type(error).__name__}: {error}")
    assert isinstance(sent, AmagoError)
    sent.__dict__["trace"] = "".join(traceback.format_exception(error))
    sent.__cause__ = sent.__context__ = None
    try:
        pickle.loads(pickle.dumps(sent))
    except Exception:  # of a class that cannot be sent
        plain = StageFailed(sent.message, hint=sent.hint)
        plain.__dict__["trace"] = sent.__dict__["trace"]
        return plain
    return sent
