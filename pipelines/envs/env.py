"""The interface of every environment: N actors, stepped as one batch, and reset only on request.

There is no automatic reset. When an actor's episode ends, `step` returns its true final observation, and the
caller resets that actor before the next step. Episode numbers run over all actors: actor i of N plays i, i +
N, i + 2N, ..., and an episode's task depends on its number, the seed and the split alone.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from pipelines.config.base import SettingsModel
from pipelines.envs.draws import Draws
from pipelines.envs.goals import GoalReward
from pipelines.errors import AmagoError, InputMissing, StageFailed, UsageError
from pipelines.lake.spaces import Spaces

Observation = Mapping[str, np.ndarray]

Noise = Callable[[int], np.ndarray]
"""Draws numbers in [0, 1), (m, count), that depend on the episode and the number of the move alone."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A published normalisation of an episode's return R: (R - low) / (high - low), with the task's own bounds.

    `bounds` are by the part of the task's name before the first "/", such as the game.
    """

    name: str
    bounds: Mapping[str, tuple[float, float]]

    @property
    def figures(self) -> tuple[str, str, str, str]:
        """The names of an evaluation's figures: mean, interval, median, and the games that they are over."""
        return f"{self.name}_mean", f"{self.name}_ci95", f"{self.name}_median", f"{self.name}_over"

    def group(self, task: str) -> str:
        """The key of `bounds` that `task` belongs to."""
        return task.partition("/")[0]


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """The description of an environment.

    `horizon`: most steps of an episode (None: no limit known). `num_attempts`: attempts at the task in every
    episode (None: their number varies). `has_success`: attempts succeed or fail. `random_*` and `optimal_*`:
    exact expectations of uniformly random actions and of the best policy that sees only observations, by
    attempt or in episode return; None where they are not known exactly. `achievements`: what an episode may achieve,
    by name (see `Env.achieved`). `score`: how papers normalise its returns. `seats`: names of the seats of a game, one
    of which the agent plays (see `envs.seats`); empty where nobody else plays. `action_mask`: the observation column
    that says which choices are legal, for `agent.action_mask`; "" where there is none. `goal_reward`: what reaching the
    goal pays, where the environment can be asked (`find_goal_reward`).
    """

    name: str
    spaces: Spaces
    horizon: int | None = None
    num_attempts: int | None = 1
    has_success: bool = False
    about: str = ""
    split: str = ""
    random_return: float | None = None
    optimal_return: float | None = None
    random_success: tuple[float, ...] | None = None
    optimal_success: tuple[float, ...] | None = None
    achievements: tuple[str, ...] = ()
    score: Score | None = None
    seats: tuple[str, ...] = ()
    action_mask: str = ""
    goal_reward: GoalReward | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one step of N actors. All arrays have leading axis N; flags are bool, rewards float32.

    `reset`: a soft reset put the actor back at a start inside the episode, and the observation shows it
    there. `attempt_end`: an attempt ended with this step; `success`: and it succeeded (False where it did not
    end).
    """

    observation: dict[str, np.ndarray]
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    reset: np.ndarray
    attempt_end: np.ndarray
    success: np.ndarray


@dataclass(frozen=True, kw_only=True)
class EnvFailure:
    """A broken environment: its actors, one line of explanation, and the traceback.

    `actors` count from the first of the batch. `reported`: another part of the environment (see `Env.parts`) has
    already reported the same event; this entry is about its own actors. `in_a_row`: how often it has happened
    consecutively.
    """

    actors: tuple[int, ...]
    message: str
    trace: str = ""
    reported: bool = False
    in_a_row: int = 1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Measurements of random play. `seconds`: a step of one actor, resets included; `length`: steps of an episode, None
    where none ended. `death`: how the environment ended the process that it was tried in ("": it did not).
    """

    seconds: float = 0.0
    length: float | None = None
    death: str = ""


class ActorsFailed(StageFailed):
    """Environments of some actors broke; the others went on. `brought` is what the call would have returned, with
    meaningless rows for the actors that failed; None if all failed.

    The actors that failed can go on after a reset.
    """

    def __init__(self, failures: Sequence[EnvFailure], brought: Any = None) -> None:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        traced = any(failure.trace for failure in failures)
        super().__init__(failures[0].message + more, hint="-v shows where it came from" if traced else None)
        self.failures, self.brought = tuple(failures), brought


_MOST_EPISODES = 40  # bits of an episode's number


@dataclass(kw_only=True)
class EpisodeCounter:
    """The number of the episode that each actor plays. Actor i of N plays first + i, first + i + N, ...

    Where these actors are a slice of more, `total` is the number of all and `offset` that of the first one here.
    `repetition` (N,): how often each actor has played its episode before; an episode that is repeated keeps its number,
    and with it its task.
    """

    num_envs: int
    total: int = 0
    offset: int = 0
    current: np.ndarray = field(init=False)
    repetition: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.total or self.num_envs
        self.current, self.repetition = np.zeros((2, self.num_envs), dtype=np.int64)
        self.start_at(0)

    def start_at(self, first: int) -> None:
        self.current[:] = first + self.offset + np.arange(self.num_envs) - self.total

    def slice(self, offset: int, num_envs: int) -> EpisodeCounter:
        """Return the counter of some of these actors, from `offset` on; it shares their numbers."""
        part = EpisodeCounter(num_envs=num_envs, total=self.total, offset=self.offset + offset)
        part.current = self.current[offset : offset + num_envs]
        part.repetition = self.repetition[offset : offset + num_envs]
        return part

    @property
    def chance(self) -> np.ndarray:
        """Numbers (N,) by which chance within the present episodes is drawn: others in each repetition."""
        return self.current + (self.repetition << _MOST_EPISODES)

    def advance(self, indices: np.ndarray) -> np.ndarray:
        """Return the numbers of the episodes that the actors `indices` begin now."""
        self.current[indices] += self.total
        return self.current[indices]


@dataclass(frozen=True, slots=True)
class OpponentTurn:
    """The games of `actors` (m,) in which the seat `place` >= 1 places after the agent's is to move.

    The other fields are the arguments of `rollout.policies.Policy.act`, of this seat in these games.
    """

    place: int
    actors: np.ndarray
    observation: Observation
    prev_action: np.ndarray
    prev_reward: np.ndarray
    time: np.ndarray
    noise: Noise


class Opponent(Protocol):
    """A player of the other seats; `name` is what trajectories call it."""

    @property
    def name(self) -> str: ...

    def act(self, turn: OpponentTurn) -> np.ndarray:
        """Choose actions (m, ...)."""


@dataclass(frozen=True)
class Opponents:
    """Who plays the other seats: every episode draws one of the `groups`, and then one of its members."""

    groups: tuple[tuple[Opponent, ...], ...]

    @property
    def members(self) -> list[Opponent]:
        return [opponent for group in self.groups for opponent in group]


class Env(ABC):
    """N actors in one environment. Actions and observations follow the system's conventions (`lake.spaces`).

    An environment of a suite declares the model of its parameters, `Settings`; `envs.make` calls `make`.
    """

    spec: EnvSpec
    Settings: ClassVar[type[SettingsModel]]

    @classmethod
    def make(cls, name: str, settings: Any, *, num_envs: int, seed: int, split: str) -> Env:
        """Make the actors of environment `name`; `settings` are of the class `Settings`."""
        return cls(name, settings, num_envs=num_envs, seed=seed, split=split)  # type: ignore[call-arg, misc, arg-type]

    def __init__(self, *, num_envs: int) -> None:
        self.num_envs = num_envs
        self.episodes = EpisodeCounter(num_envs=num_envs)

    @abstractmethod
    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Begin a new episode for the actors in `mask` (N,) bool (None: all); observations of all N
        actors. ActorsFailed where some environments break.
        """

    @abstractmethod
    def step(self, actions: np.ndarray) -> StepResult:
        """One step of every actor with `actions` (N, *action shape). ActorsFailed where some environments break."""

    @property
    def parts(self) -> tuple[Env, ...]:
        """Environments of consecutive actors whose steps may overlap: one may begin before another ends. Most
        environments are one part.
        """
        return (self,)

    def begin_step(self, actions: np.ndarray) -> None:
        """Start a step: send the actions."""
        self._begun = actions

    @property
    def waits_on(self) -> Sequence[int]:
        """File descriptors that are all readable (`select.poll`) once `end_step`, after `begin_step`, need not wait;
        none where that cannot be known.
        """
        return ()

    def on_wait(self) -> None:  # noqa: B027 (most have nothing to wait for)
        """Called about once a second while one of `waits_on` cannot be read."""

    def end_step(self) -> StepResult:
        """Finish the step that `begin_step` started; most environments do all of it here."""
        return self.step(self._begun)

    @abstractmethod
    def tasks(self, indices: np.ndarray) -> list[str]:
        """Return the names of the tasks that the actors `indices` are in."""

    def goal_texts(self, indices: np.ndarray) -> list[str]:
        """Return the instructions of the actors `indices`, in words; "" where there are none."""
        return [""] * len(indices)

    def seeds(self, indices: np.ndarray) -> Sequence[int | None]:
        """Return the seeds with which the episodes of the actors `indices` were reset; None where an episode has no
        seed of its own.
        """
        return [None] * len(indices)

    def achieved(self, indices: np.ndarray) -> np.ndarray:
        """Return which of `spec.achievements` the current episodes of the actors `indices` (m,) have: (m, K) bool."""
        return np.zeros((len(indices), len(self.spec.achievements)), dtype=bool)

    def play_against(self, opponents: Opponents) -> None:
        """Have `opponents` play the other seats in episodes that begin from now on. UsageError if there are none."""
        raise UsageError(
            f"environment '{self.spec.name}' has a single seat, so it takes no opponents",
            hint="leave out opponents; docs/games.md lists environments with several seats",
        )

    def make_rule_opponent(self, name: str) -> Opponent | None:
        """Make the opponent called "random", or "expert" if the game has one; None for any other name."""
        return None

    def opponents(self, indices: np.ndarray) -> list[str]:
        """Return the names of the opponents in the episodes of the actors `indices`; "" where nobody else plays."""
        return [""] * len(indices)

    def outcomes(self, indices: np.ndarray) -> np.ndarray:
        """Return how the games of the actors `indices` (m,) stand: 1 won, 0.5 drawn, 0 lost."""
        return np.zeros(len(indices))

    def play_only(self, tasks: Sequence[str]) -> None:
        """Play these tasks, named as `tasks` names them, in turn: episode k plays number k modulo their number. Call
        before `reset`. InputMissing where the environment's tasks cannot be chosen, or where it does not have one of
        them.
        """
        raise InputMissing(
            f"environment '{self.spec.name}' does not let its tasks be chosen", hint="evaluate it without --tasks"
        )

    def play_evenly(self) -> None:  # noqa: B027 (most draw their tasks from one distribution)
        """Play the kinds of tasks, such as games, in turn instead of drawing one for each episode. Call before `reset`.

        Episode k plays number k modulo their number, of an order that follows from seed and split: any number of
        consecutive episodes has each kind as often as any other, but for one. An environment without kinds is not
        changed.
        """

    @property
    def steps_one_by_one(self) -> bool:
        """Whether actors are stepped one after another, so that processes can share them."""
        return False

    def try_out(self, longest: float = 0.0) -> Trial | None:
        """Play at random for a moment: a quarter of a second, or up to one where too few episodes have ended and they
        may yet be shorter than `longest` steps. None where all actors step as one batch, or where a step fails.
        """
        return None

    def render(self, mode: str = "rgb_array", actor: int = 0) -> Any:
        """Draw an actor's present state, which does not change: "rgb_array" returns a picture (H, W, 3) uint8, "ansi"
        lines of plain text. None where the environment has no such drawing.
        """
        return None

    @property
    def has_expert(self) -> bool:
        """Whether `expert` offers actions."""
        return type(self).expert is not Env.expert

    def expert(self) -> np.ndarray | None:
        """Return good actions (N,) for the current states, chosen with access to the hidden state; None if there is no
        expert.
        """
        return None

    def close(self) -> None:  # noqa: B027 (most have nothing to free)
        """Free what the environment holds."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the sequence of tasks; episodes in progress are not part of it."""
        return {"next_episode": int(self.episodes.current.max()) + 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with tasks that have not been played; call before `reset`."""
        self.episodes.start_at(int(state["next_episode"]))


class EpisodeEnv(Env):
    """Base of adapters whose episodes follow from `draws`, by the episode's number alone.

    Reset seeds are even in training and odd in tests, so that the two sides never meet.
    """

    RESET_STREAM = 0  # purpose of the draws of reset seeds

    def __init__(self, name: str, *, num_envs: int, seed: int, split: str) -> None:
        super().__init__(num_envs=num_envs)
        self.draws, self._test = Draws(seed, split, name), split == "test"
        self._in_turn = False  # kinds of tasks are played one after another, not drawn
        self._nobody = np.zeros(num_envs, dtype=bool)
        self._nobody.setflags(write=False)

    def _advance(self, mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Count the episodes that the actors in `mask` (None: all) begin; return the actors and the numbers, (m,)."""
        indices = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        return indices, self.episodes.advance(indices)

    def _draw_seeds(self, episodes: np.ndarray) -> np.ndarray:
        return 2 * self.draws.integers(episodes, self.RESET_STREAM, 2**30) + self._test

    def _choose(self, episodes: np.ndarray, stream: int, count: int) -> np.ndarray:
        """Choose one of `count` kinds of tasks for each episode."""
        return episodes % count if self._in_turn else self.draws.integers(episodes, stream, count)


def unknown_task(task: str, env: str, *, why: str = "", hint: str | None = None) -> InputMissing:
    """Return the error for a `task` that environment `env` does not have."""
    return InputMissing(
        f"'{task}' is not a task of environment '{env}' with these parameters{why and ': '}{why}",
        hint=hint or "choose tasks of this environment, e.g. --tasks \"env = '...'\"",
    )


def try_call(
    env: Env, call: Callable[[], Any], mask: np.ndarray | None = None, *, blame: type[AmagoError] | None = None
) -> tuple[Any, ActorsFailed | None]:
    """Call the environment, and return its result and failures. An exception of the whole environment counts as a
    failure of all actors (in `mask`), without a result.

    Errors of our own are raised, except those of the type `blame`: in a worker process they count as the
    environment's.
    """
    try:
        return call(), None
    except ActorsFailed as error:
        return error.brought, error
    except Exception as error:
        if isinstance(error, AmagoError) and (blame is None or not isinstance(error, blame)):
            raise
        actors = range(env.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        problem = error.message if isinstance(error, AmagoError) else f"{type(error).__name__}: {error}"
        message = f"environment '{env.spec.name}' failed: {problem}"
        trace = "".join(traceback.format_exception(error))
        failed = ActorsFailed([EnvFailure(actors=tuple(actors), message=message, trace=trace)])
        failed.__cause__ = error
        return None, failed


def rows_not_finite(column: np.ndarray) -> list[int]:
    """Find the rows of `column` that have an infinite value, or one that is not a number."""
    finite = np.isfinite(column)
    return [] if finite.all() else np.flatnonzero(~finite.reshape(len(column), -1).all(1)).tolist()
