"""`atari-GAME` and `atari-multi`: games of the Atari 2600, in the Arcade Learning Environment's vector environment.

The vector environment resets by itself in the step after an end (NEXT_STEP); here every end is followed by a reset with
the next episode's own seed before that step, so no step is lost, and what an end returns is its true final observation.
ale-py is under GPL-2.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from ale_py import Action, roms
from ale_py.vector_env import AtariVectorEnv
from pydantic import Field

from pipelines.envs.env import EnvSpec, EpisodeEnv, Score, StepResult, unknown_task
from pipelines.envs.suites.reference_scores import ATARI
from pipelines.envs.suites.suite import ProtocolSettings
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, Space, Spaces
from pipelines.nearest import did_you_mean

PREFIX = "atari-"
GAME, _ORDER = 1, 2  # purposes of random draws
_SAME_GAMES = "the same games, separate seeds"
UP, RIGHT, LEFT, DOWN, FIRE = range(5)  # bits of a multi-binary action
# The 57 games of Mnih et al. (2015) and Bellemare et al. (2013) on which agents are usually compared.
_USUAL = """
    alien amidar assault asterix asteroids atlantis bank_heist battle_zone beam_rider berzerk bowling boxing
    breakout centipede chopper_command crazy_climber defender demon_attack double_dunk enduro fishing_derby
    freeway frostbite gopher gravitar hero ice_hockey jamesbond kangaroo krull kung_fu_master montezuma_revenge
    ms_pacman name_this_game phoenix pitfall pong private_eye qbert riverraid road_runner robotank seaquest skiing
    solaris space_invaders star_gunner surround tennis time_pilot tutankham up_n_down venture video_pinball
    wizard_of_wor yars_revenge zaxxon
"""
_ATARI57 = tuple(_USUAL.split())
# The joystick's positions by up, right, left, down, fire, of which opposite ones cancel: (2, 2, 2, 2, 2) int32.
_POSITIONS = np.zeros((2,) * 5, dtype=np.int32)
for _bits in np.ndindex(_POSITIONS.shape):
    _position = ("DOWN", "", "UP")[1 + _bits[UP] - _bits[DOWN]] + ("LEFT", "", "RIGHT")[1 + _bits[RIGHT] - _bits[LEFT]]
    _POSITIONS[_bits] = Action.__members__[_position + ("FIRE" if _bits[FIRE] else "") or "NOOP"].value


class AtariSettings(ProtocolSettings):
    """Parameters of `atari-GAME`."""

    PAPER: ClassVar = {"color": False, "stack": 4, "sticky": 0.0, "noop_max": 30}  # Mnih et al. (2015)

    actions: Literal["discrete", "multi-binary", "continuous"] = "discrete"
    """discrete: one of the joystick's 18 positions; multi-binary: up, right, left, down, fire (opposite ones cancel);
    continuous: radius, angle and fire.
    """
    color: bool = True
    """Three channels; false: one, grey."""
    size: int = Field(84, ge=16, le=210)
    """Height and width of the picture."""
    stack: int = Field(1, ge=1, le=16)
    """Pictures shown at once, the oldest first, along the channels."""
    frame_skip: int = Field(4, ge=1)
    """Frames for which an action is repeated."""
    sticky: float = Field(0.25, ge=0, lt=1)
    """Chance, in each frame, that the previous action is repeated instead (Machado et al. 2018)."""
    noop_max: int = Field(0, ge=0)
    """Most frames of doing nothing at an episode's beginning; their number is random."""
    max_frames: int = Field(108_000, ge=1)
    """Frames after which an episode is truncated (108,000: half an hour)."""
    life_ends_episode: bool = False
    """A lost life ends the episode; the next is a new game."""
    clip_rewards: bool = False
    """Rewards become their sign."""
    threads: int = Field(0, ge=0)
    """Threads that run the emulators of one process; 0: as many as cores."""

    @property
    def horizon(self) -> int:
        return -(-self.max_frames // self.frame_skip)


class _AtariMultiSettings(AtariSettings):
    """Parameters of `atari-multi`."""

    games: tuple[str, ...] = Field(_ATARI57, min_length=1)
    """Games to train on, each as likely; default: the usual 57."""
    test_games: tuple[str, ...] = ()
    """Games of `split = "test"`; empty: those of training, with other seeds."""


@dataclass
class _Slot:
    """A vector environment of one game, and the actors that play in it."""

    game: str
    env: AtariVectorEnv
    actors: np.ndarray
    fresh: bool = True


class Atari(EpisodeEnv):
    """N actors. One game: one vector environment for all; several games: one for each actor, replaced when its game
    changes.
    """

    Settings: ClassVar[type[AtariSettings]] = AtariSettings

    def __init__(self, name: str, settings: AtariSettings, *, num_envs: int, seed: int, split: str) -> None:
        super().__init__(name, num_envs=num_envs, seed=seed, split=split)
        s = self.settings = settings
        self.games, about, splits = self._choose_games(name, split)
        self._playing = self.games
        self._is_multi = isinstance(s, _AtariMultiSettings)
        image = Box(shape=(s.size, s.size, s.stack * (3 if s.color else 1)), dtype="uint8")
        actions: dict[str, Space] = {
            "discrete": Discrete(n=len(Action.__members__)),
            "multi-binary": MultiBinary(n=5),
            "continuous": Box(shape=(3,), low=(0.0, -np.pi, 0.0), high=(1.0, np.pi, 1.0)),
        }
        self.spec = EnvSpec(
            name=name,
            spaces=Spaces(observation={"obs": image}, action=actions[s.actions]),
            horizon=s.horizon,
            about=about,
            split=splits,
            score=None if s.clip_rewards or s.life_ends_episode else Score(name="human_normalized", bounds=ATARI),
        )
        self._slots: list[_Slot | None] = [None] * (num_envs if self._is_multi else 1)
        self._lives = np.zeros(num_envs, dtype=np.int64)
        self._columns: np.ndarray | None = None

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        indices, episodes = self._advance(mask)
        seeds = self._draw_seeds(episodes)
        shown = np.empty((self.num_envs, *self.spec.spaces.observation["obs"].shape), dtype=np.uint8)
        if self._columns is not None:
            shown[:] = self._columns
        if not self._is_multi:
            only = self._slots[0] = self._slots[0] or self._make_slot(self.games[0], np.arange(self.num_envs))
            self._reset_slot(only, indices, seeds, shown)
        else:
            for actor, place, own in zip(indices, self._choose(episodes, GAME, len(self._playing)), seeds, strict=True):
                game = self._playing[place]
                slot = self._slots[actor]
                if slot is None or slot.game != game:
                    slot = self._slots[actor] = self._make_slot(game, np.array([actor]))
                self._reset_slot(slot, np.array([0]), np.array([own]), shown)
        self._columns = shown
        return {"obs": shown}

    def _reset_slot(self, slot: _Slot, rows: np.ndarray, seeds: np.ndarray, shown: np.ndarray) -> None:
        """Begin games in `rows` of the slot."""
        mask = np.zeros(len(slot.actors), dtype=bool)
        mask[rows] = True
        if slot.fresh:  # the emulators insist on a first reset of all
            every = np.zeros(len(slot.actors), dtype=np.int64)
            every[rows] = seeds
            observation, info = slot.env.reset(seed=every)
            slot.fresh = False
        else:
            observation, info = slot.env.reset(seed=seeds, options={"reset_mask": mask})
        shown[slot.actors[mask]] = self._picture(observation[mask])
        self._lives[slot.actors[mask]] = info["lives"][mask]

    def step(self, actions: np.ndarray) -> StepResult:
        n = self.num_envs
        shown = np.empty((n, *self.spec.spaces.observation["obs"].shape), dtype=np.uint8)
        reward = np.empty(n, dtype=np.float32)
        terminated, truncated = np.zeros((2, n), dtype=bool)
        lives = np.empty(n, dtype=np.int64)
        decoded = self._decode(actions)
        slots = [slot for slot in self._slots if slot is not None]
        for slot in slots:
            slot.env.send(decoded[slot.actors])
        for slot in slots:
            observation, paid, over, cut, info = slot.env.recv()
            where = slot.actors
            shown[where], reward[where] = self._picture(observation), paid
            terminated[where], truncated[where], lives[where] = over, cut, info["lives"]
        if self.settings.life_ends_episode:
            terminated |= lives < self._lives
        truncated &= ~terminated
        self._lives, self._columns = lives, shown
        return StepResult(
            observation={"obs": shown},
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            reset=self._nobody,
            attempt_end=terminated | truncated,
            success=self._nobody,
        )

    def tasks(self, indices: np.ndarray) -> list[str]:
        """Name the game."""
        return [slot.game for slot in (self._slots[i if self._is_multi else 0] for i in indices) if slot is not None]

    def play_only(self, tasks: Sequence[str]) -> None:
        for name in tasks:
            if name not in self.games:
                raise unknown_task(
                    name,
                    self.spec.name,
                    hint=f"its tasks are games: {', '.join(self.games[:8])}{', ...' if len(self.games) > 8 else ''}",
                )
        self._playing, self._in_turn = tuple(tasks), True

    def play_evenly(self) -> None:
        self._playing, self._in_turn = self.draws.shuffle(self.games, _ORDER), True

    def close(self) -> None:
        self._slots = [None] * len(self._slots)

    def _choose_games(self, name: str, split: str) -> tuple[tuple[str, ...], str, str]:
        """Choose the games that may be played; a few words about them, and about the split."""
        game = _find_game(name.removeprefix(PREFIX))
        about = f"{game.replace('_', ' ').title()} of the Atari 2600, its own score (ALE is under GPL-2.0)"
        return (game,), about, _SAME_GAMES

    def _make_slot(self, game: str, actors: np.ndarray) -> _Slot:
        s = self.settings
        env = AtariVectorEnv(
            game,
            len(actors),
            num_threads=1 if self._is_multi else s.threads,
            max_num_frames_per_episode=s.max_frames,
            repeat_action_probability=s.sticky,
            full_action_space=True,
            continuous=s.actions == "continuous",
            autoreset_mode="NextStep",
            img_height=s.size,
            img_width=s.size,
            grayscale=not s.color,
            stack_num=s.stack,
            frameskip=s.frame_skip,
            maxpool=s.frame_skip > 1,
            noop_max=s.noop_max,
            episodic_life=False,
            life_loss_info=False,
            reward_clipping=s.clip_rewards,
            use_fire_reset=False,
        )
        return _Slot(game, env, actors)

    def _picture(self, frames: np.ndarray) -> np.ndarray:
        """(m, stack, height, width[, 3]) -> (m, height, width, channels)."""
        if not self.settings.color:
            return np.moveaxis(frames, 1, -1)
        if self.settings.stack == 1:
            return frames[:, 0]
        return np.moveaxis(frames, 1, -2).reshape(*frames.shape[:1], *frames.shape[2:4], -1)

    def _decode(self, actions: np.ndarray) -> np.ndarray:
        """The system's actions -> the emulator's: numbers of joystick positions, or (N, 3) radius, angle, fire."""
        if self.settings.actions == "multi-binary":
            return _POSITIONS[tuple(np.asarray(actions).T.astype(np.int64))]
        if self.settings.actions == "continuous":
            radius, angle, fire = np.asarray(actions, dtype=np.float32).T
            return np.stack([(radius + 1) / 2, angle * np.float32(np.pi), (fire + 1) / 2], axis=1)
        return np.asarray(actions, dtype=np.int32)


class AtariMulti(Atari):
    """N actors in several games."""

    Settings = _AtariMultiSettings

    def _choose_games(self, name: str, split: str) -> tuple[tuple[str, ...], str, str]:
        s = self.settings
        assert isinstance(s, _AtariMultiSettings)
        train, test = tuple(map(_find_game, s.games)), tuple(map(_find_game, s.test_games))
        both = sorted({*train} & {*test})
        if both:
            raise UsageError(
                f"environment '{name}': games both of training and of test: {', '.join(both)}",
                hint="leave env.test_games empty to test the games of training with other seeds",
            )
        games, splits = test if test and split == "test" else train, _SAME_GAMES
        if test:
            splits = f"{len(train)} games to train on, {len(test)} others to test"
        return games, f"{len(games)} games of the Atari 2600, one in each episode (ALE is under GPL-2.0)", splits


def _find_game(game: str) -> str:
    known = roms.get_all_rom_ids()
    game = game.replace("-", "_")
    if game not in known:
        some = f"{len(known)} are known, such as {', '.join(_ATARI57[:6])}"
        hint = did_you_mean(game, known, otherwise=some)
        raise UsageError(f"there is no Atari game '{game}'", hint=hint)
    return game
