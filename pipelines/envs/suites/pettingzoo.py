"""`pettingzoo:NAME`, and environments of PettingZoo's interfaces by `module:attr`: games whose seats are its agents.

An AECEnv is used as it is; a ParallelEnv through PettingZoo's own conversion, in which the agents choose one after
another before all of them act. Games are made and stepped one after another in this process.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from pydantic import ConfigDict, Field

from pipelines.envs.env import rows_not_finite
from pipelines.envs.gymnasium_env import first_sentence
from pipelines.envs.seats import Game, SeatedEnv, SeatSettings
from pipelines.envs.spec import MAX_LENGTH, ActionCodec, ObservationCodec
from pipelines.errors import AmagoError, InputMissing, StageFailed, UsageError, is_stop
from pipelines.lake.spaces import OBSERVATION, Discrete, Spaces
from pipelines.nearest import did_you_mean

PREFIX = "pettingzoo:"
_MASK = "action_mask"


class PettingZooSettings(SeatSettings):
    """Parameters of `pettingzoo:NAME`; any other key goes to the environment's constructor."""

    model_config = ConfigDict(frozen=True, extra="allow")

    max_episode_steps: int | None = Field(None, ge=1)
    """Truncate episodes after so many moves of the agent."""
    max_length: int = Field(MAX_LENGTH, ge=1)
    """Room for the numbers of a Sequence, or the characters of a text whose space sets no limit; more is an error."""


class PettingZooGame(Game):
    """N environments made by `factory`. One that breaks is replaced when its game begins again.

    The action mask is the key `action_mask` of the observation or, as PettingZoo also has it, of `infos`:
    then it is added to the observation.
    """

    def __init__(self, name: str, factory: Callable[[], Any], num_games: int, *, max_length: int = MAX_LENGTH) -> None:
        self._name, self._factory = name, factory
        self._envs = [self._make_one() for _ in range(num_games)]
        first = self._envs[0]
        self.seats = tuple(map(str, first.possible_agents))
        if len(self.seats) < 2:
            raise UsageError(f"environment '{name}' has {len(self.seats)} agent: a game has two seats or more")
        self._agents: tuple[Any, ...] = tuple(first.possible_agents)
        spaces = [(first.observation_space(agent), first.action_space(agent)) for agent in self._agents]
        for seat, pair in zip(self.seats, spaces, strict=True):
            if pair != spaces[0]:
                raise UsageError(
                    f"environment '{name}': seat '{seat}' has other spaces than seat '{self.seats[0]}'",
                    hint="make them equal by a wrapper of PettingZoo or SuperSuit, e.g. pad_observations_v0",
                )
        space, action = spaces[0]
        self._adds_mask = not self._has_key(space) and self._finds_mask(first)
        if self._adds_mask:
            import gymnasium

            mask = gymnasium.spaces.Box(0, 1, (int(action.n),), np.int8)
            space = gymnasium.spaces.Dict({"observation": space, _MASK: mask})
        self._observations = ObservationCodec(space, name=name, max_length=max_length)
        self._actions = ActionCodec(action, name=name)
        self.spaces = Spaces(observation=self._observations.spaces, action=self._actions.space)
        is_masked = self._has_key(space) and isinstance(self.spaces.action, Discrete)
        self.mask = f"{OBSERVATION}.{_MASK}" if is_masked else ""
        self.about = first_sentence(first)
        super().__init__(num_games)
        self._broken: set[int] = set()
        self._final: list[dict[int, Any]] = [{} for _ in range(num_games)]  # last observations of seats that are done

    @staticmethod
    def _has_key(space: Any) -> bool:
        return _MASK in getattr(space, "spaces", {})

    @staticmethod
    def _finds_mask(env: Any) -> bool:
        """Whether a game's infos have the mask of its first mover."""
        env.reset(seed=0)
        return _MASK in (env.infos.get(env.agent_selection) or {})

    def _make_one(self) -> Any:
        from pettingzoo import AECEnv, ParallelEnv
        from pettingzoo.utils import parallel_to_aec

        try:
            made = self._factory()
        except AmagoError:
            raise
        except ImportError as error:
            raise InputMissing(f"environment '{self._name}' needs a package: {error}") from error
        except Exception as error:
            text = f"environment '{self._name}' cannot be made: {type(error).__name__}: {error}"
            raise StageFailed(text, hint="-v shows where it came from") from error
        if isinstance(made, ParallelEnv):
            return parallel_to_aec(made)
        if not isinstance(made, AECEnv):
            text = f"environment '{self._name}' gives {type(made).__name__}, not an AECEnv or a ParallelEnv"
            raise UsageError(text)
        return made

    def begin(self, games: np.ndarray, seeds: np.ndarray) -> None:
        for game, seed in zip(games.tolist(), seeds.tolist(), strict=True):
            self.terminated[game] = self.truncated[game] = False
            self._final[game] = {}
            with self._note_failure(game):
                if game in self._broken:
                    with contextlib.suppress(Exception):  # it is broken, and may fail here as well
                        self._envs[game].close()
                    self._envs[game] = self._make_one()
                    self._broken.discard(game)
                self._envs[game].reset(seed=seed)
                self._settle(game)

    def move(self, games: np.ndarray, actions: np.ndarray) -> np.ndarray:
        rewards = np.zeros((len(games), len(self.seats)), dtype=np.float32)
        for row, (game, action) in enumerate(zip(games.tolist(), self._actions.decode(actions), strict=True)):
            with self._note_failure(game):
                env = self._envs[game]
                env.step(action)
                rewards[row] = [env.rewards.get(agent, 0.0) for agent in self._agents]
                if rows_not_finite(rewards[row][:, None]):
                    raise ValueError(f"its rewards are {dict(env.rewards)}")
                self._settle(game)
            if game in self.failures:
                rewards[row] = 0
        return rewards

    def _settle(self, game: int) -> None:
        """Note which seats are done, remove them until one is to move that is not, and note its turn."""
        env, final = self._envs[game], self._final[game]
        while True:
            for seat, agent in enumerate(self._agents):
                over = env.terminations.get(agent, False), env.truncations.get(agent, False)
                if any(over) and seat not in final:
                    final[seat] = self._read(game, agent)
                    self.terminated[game, seat], self.truncated[game, seat] = over
            if len(final) == len(self._agents) or not env.agents:
                return
            selected = self._agents.index(env.agent_selection)
            if selected not in final:
                self.turn[game] = selected
                return
            env.step(None)

    def _read(self, game: int, agent: Any) -> Any:
        env = self._envs[game]
        observation = env.observe(agent)
        if not self._adds_mask:
            return observation
        legal = (env.infos.get(agent) or {}).get(_MASK) if agent == env.agent_selection else None
        return {"observation": observation, _MASK: np.zeros(self.spaces.action.flat_size) if legal is None else legal}

    def observe(self, games: np.ndarray, seats: np.ndarray) -> dict[str, np.ndarray]:
        columns = self._observations.empty(len(games))
        for row, (game, seat) in enumerate(zip(games.tolist(), seats.tolist(), strict=True)):
            with self._note_failure(game):
                final = self._final[game]
                found = final[seat] if seat in final else self._read(game, self._agents[seat])
                self._observations.write(found, columns, row)
                continue
            for column in columns.values():
                column[row] = 0
        for row, message in self._observations.not_finite(columns).items():
            self.failures.setdefault(int(games[row]), ValueError(message))
            self._broken.add(int(games[row]))
        return columns

    @contextlib.contextmanager
    def _note_failure(self, game: int) -> Iterator[None]:
        """Note what is raised by the code of a game; a user's interrupt is raised again."""
        try:
            yield
        except BaseException as error:
            if is_stop(error):
                raise
            self.failures[game] = error
            self._broken.add(game)

    def render(self, mode: str, game: int) -> Any:
        env = self._envs[game]
        return env.render() if getattr(env, "render_mode", None) == mode else None

    def close(self) -> None:
        for env in self._envs:
            with contextlib.suppress(Exception):  # an error here costs nothing
                env.close()


class PettingZoo:
    """Makes `pettingzoo:NAME`."""

    Settings = PettingZooSettings

    @classmethod
    def make(
        cls, name: str, settings: PettingZooSettings, *, num_envs: int, seed: int, split: str, drawn: bool = False
    ) -> SeatedEnv:
        """Make the actors; `drawn`: with a `render_mode`."""
        import pettingzoo

        id, kwargs = find_id(name.removeprefix(PREFIX)), dict(settings.model_extra or {})
        if drawn:
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame would look for a display
            kwargs = {"render_mode": "rgb_array", **kwargs}
        return seat(
            name, lambda: pettingzoo.make("aec", id, **kwargs), settings, num_envs=num_envs, seed=seed, split=split
        )


def seat(name: str, factory: Callable[[], Any], settings: Any, *, num_envs: int, seed: int, split: str) -> SeatedEnv:
    """Make one actor for each environment that `factory` makes."""
    from pettingzoo.utils.env_logger import EnvLogger

    EnvLogger.suppress_output()  # of illegal moves, which rewards report
    game = PettingZooGame(name, factory, num_envs, max_length=settings.max_length)
    wanted = SeatSettings(seat=settings.seat or "")
    limit = settings.max_episode_steps
    return SeatedEnv(name, game, wanted, num_envs=num_envs, seed=seed, split=split, limit=limit)


def is_pettingzoo(env: Any) -> bool:
    """Whether `env` has one of PettingZoo's interfaces; imports nothing."""
    library: Any = sys.modules.get("pettingzoo")
    return library is not None and isinstance(env, library.AECEnv | library.ParallelEnv)


def find_id(name: str) -> str:
    """Find the ID in PettingZoo's registry that `name` stands for, with or without its namespace. UsageError if there
    is none."""
    from pettingzoo import aec_registry

    wanted = re.sub(r"_v(?=\d+$)", "-v", name)
    found = [id for id in aec_registry if wanted in (id, id.partition("/")[2])]
    if found:
        return found[0]
    names = [re.sub(r"-v(?=\d+$)", "_v", id.partition("/")[2]) for id in aec_registry]
    hint = did_you_mean(name, names, otherwise=f"there are {', '.join(sorted(names))}")
    raise UsageError(f"PettingZoo has no environment '{name}'", hint=hint)
