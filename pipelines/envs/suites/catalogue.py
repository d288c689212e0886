"""Which suites of environments there are, known without importing any of them.

A suite is one module of `envs.suites`; the first whose pattern fits a name makes it, so exact names stand before
the prefixes that they share.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

from pipelines.errors import InputMissing


@dataclass(frozen=True, kw_only=True)
class Suite:
    """`pattern` is a name, or a prefix followed by `*`, which stands for what `placeholder` says. `extra`: the optional
    dependency that brings the modules `requires`; `conflict`: which extras it does not go with, and why. `spaces`,
    `tasks`, `horizon` and `ends` say in a few words, without importing anything, what is seen and done, what differs
    between episodes (and how test differs from train), how long they are, and how one ends.
    """

    name: str
    pattern: str
    module: str
    about: str
    placeholder: str = "ID"
    extra: str | None = None
    requires: tuple[str, ...] = ()
    conflict: str = ""
    spaces: str = ""
    tasks: str = ""
    horizon: str = ""
    ends: str = ""

    def matches(self, name: str) -> bool:
        if self.pattern.endswith("*"):
            prefix = self.pattern[:-1]
            return name.startswith(prefix) and len(name) > len(prefix)
        return name == self.pattern

    @property
    def is_exact(self) -> bool:
        return not self.pattern.endswith("*") and self is not OWN_CLASS

    @property
    def installed(self) -> bool:
        return all(find_spec(package) is not None for package in self.requires)

    def load(self, name: str) -> ModuleType:
        """The suite's module. InputMissing where its extra is not installed."""
        if not self.installed:
            raise InputMissing(
                f"environment '{name}' needs the extra '{self.extra}'",
                hint=f'pip install "amago[{self.extra}]"' + (f" ({self.conflict})" if self.conflict else ""),
            )
        return importlib.import_module(self.module)


_SUITES = "pipelines.envs.suites."
OWN_CLASS = Suite(
    name="own",
    pattern="module:attr",
    module=f"{_SUITES}gymnasium_env",
    about="Your own gymnasium.Env: a class or factory, importable from Python's path",
    spaces="the environment's own",
    tasks="one, or a TaskEnv's; test: other seeds, or its own split",
    horizon="the environment's own, or env.max_episode_steps",
    ends="as the environment says; truncated at env.max_episode_steps",
)
_PROCGEN_ALONE = (
    "in a virtual environment of its own, since it needs numpy below 2, and an older imageio-ffmpeg than jax; or "
    "beside numpy 2 without its dependencies, see docs/environments.md"
)
_JAX_AND_OTHERS = (
    "gymnax holds gymnasium below 1.4; not beside procgen, whose imageio-ffmpeg is older, nor popgym-arcade, whose "
    "stable-gymnax overwrites gymnax"
)
SUITES: tuple[Suite, ...] = (
    Suite(
        name="built-in",
        pattern="meta-frozen-lake",
        module=f"{_SUITES}frozen_lake",
        about="Find the way over an unseen lake, then walk it again",
        spaces="4 numbers, 5 choices",
        tasks="hidden maps; test: a fifth of them, held out (from size 4 on)",
        horizon="10 attempts of size x size steps",
        ends="terminated after the last attempt, which ends at the goal, in a hole or at its time limit",
    ),
    Suite(
        name="built-in",
        pattern="dark-key-door",
        module=f"{_SUITES}dark_key_door",
        about="Find a hidden key, then a hidden door, again and again",
        spaces="4 numbers, light: 8; 5 choices",
        tasks="hidden start, key and door; test: other draws of them",
        horizon="500 steps, attempts of 50",
        ends="terminated and truncated at the horizon; an attempt ends at the door or at its time limit",
    ),
    Suite(
        name="built-in",
        pattern="tmaze",
        module=f"{_SUITES}tmaze",
        about="Remember a sign until the corridor's end",
        spaces="2 numbers, 4 choices",
        tasks="goal left or right; test: the same two",
        horizon="corridor + 1 steps, active: + 3",
        ends="terminated and truncated with its last step, whatever was done",
    ),
    Suite(
        name="built-in",
        pattern="goal-frozen-lake",
        module=f"{_SUITES}goal_frozen_lake",
        about="Walk to a goal cell that is shown; ready for hindsight relabelling",
        spaces="6 numbers, goal and achieved goal of 2; 5 choices",
        tasks="maps and shown goals; test: a fifth of the maps, held out",
        horizon="size x size steps",
        ends="terminated at the goal or in a hole; truncated at the time limit",
    ),
    Suite(
        name="built-in",
        pattern="alchemy",
        module=f"{_SUITES}alchemy",
        about="Find out what potions do to stones, trial after trial with one hidden chemistry",
        spaces="39 numbers, 40 choices",
        tasks="hidden chemistries, 167,424; test: a fifth of them, held out",
        horizon="10 trials of 20 steps",
        ends="terminated and truncated after the last trial",
    ),
    Suite(
        name="built-in",
        pattern="mazerunner",
        module=f"{_SUITES}mazerunner",
        about="Visit goals in order in an unseen maze; ready for relabelled instructions",
        spaces="7 numbers, place of 2, goals of 2 each; 5 choices",
        tasks="unseen mazes, shown goals; test: a fifth of the mazes, held out",
        horizon="250 steps",
        ends="terminated at the last goal; terminated and truncated at the time limit",
    ),
    Suite(
        name="mujoco",
        pattern="half-cheetah-vel",
        module=f"{_SUITES}half_cheetah_vel",
        about="Run at a velocity that only the reward tells",
        extra="mujoco",
        requires=("mujoco",),
        spaces="17 numbers, Box of 6",
        tasks="hidden velocities from 0 to 3 m/s; test: six of 30 bands, held out",
        horizon="1 attempt of 1000 steps",
        ends="truncated after the last attempt",
    ),
    Suite(
        name="dm_control",
        pattern="dmc:*",
        placeholder="DOMAIN-TASK",
        module=f"{_SUITES}dm_control",
        about="DeepMind's control suite",
        extra="dmc",
        requires=("shimmy", "dm_control"),
        spaces="numbers by name, Box",
        tasks="one, from random starts; test: other seeds",
        horizon="1000 steps",
        ends="truncated at the time limit",
    ),
    Suite(
        name="robotics",
        pattern="robotics:*",
        module=f"{_SUITES}robotics",
        about="Fetch, PointMaze, AntMaze and AdroitHand; goals ready for hindsight relabelling",
        extra="robotics",
        requires=("gymnasium_robotics",),
        spaces="numbers, achieved and desired goal; Box",
        tasks="random starts and goals; test: other seeds",
        horizon="Fetch 50, AdroitHand 200, mazes 300 to 1000 steps",
        ends="truncated at the time limit; mazes terminated at the goal if env.continuing_task is false",
    ),
    Suite(
        name="gymnasium",
        pattern="gym:*",
        module=f"{_SUITES}gymnasium_env",
        about="Any environment registered with gymnasium",
        spaces="the environment's own",
        tasks="one; test: other seeds",
        horizon="as registered, or env.max_episode_steps",
        ends="terminated as the environment says; truncated at the time limit",
    ),
    *(
        Suite(
            name="metaworld",
            pattern=f"metaworld-ml{classes}",
            placeholder="TASK",
            module=f"{_SUITES}metaworld",
            about=f"A robot arm learns a task of {number} within the episode",
            extra="metaworld",
            requires=("metaworld",),
            spaces="40 numbers, 4 continuous actions",
            tasks=f"50 hidden goals of each class; test: {test}",
            horizon="3 attempts of 500 steps",
            ends="terminated and truncated with the last attempt; an attempt lasts its 500 steps, also after success",
        )
        for classes, number, test in (
            ("1-*", "one class", "50 others"),
            ("10", "10 classes", "5 other classes"),
            ("25", "25 classes", "50 others of 5 classes, 4 of them new"),
            ("45", "45 classes", "5 other classes"),
        )
    ),
    *(
        Suite(
            name="metaworld",
            pattern=f"metaworld-mt{classes}",
            module=f"{_SUITES}metaworld",
            about=f"A robot arm does tasks of {classes} classes, which it is told",
            extra="metaworld",
            requires=("metaworld",),
            spaces="40 numbers and the class, 4 continuous actions",
            tasks="50 shown goals of each class; test: 50 others",
            horizon="500 steps",
            ends="terminated and truncated after 500 steps, also after success",
        )
        for classes in (10, 25, 50)
    ),
    Suite(
        name="crafter",
        pattern="crafter",
        module=f"{_SUITES}crafter",
        about="Survive in an unseen world, or follow instructions there",
        extra="crafter",
        requires=("crafter", "numba"),
        spaces="64x64 picture, with env.goals also goals of three words; 17 choices",
        tasks="worlds and instructions; test: other seeds",
        horizon="10,000 steps",
        ends="terminated by death or after the last instruction; truncated at env.max_steps",
    ),
    Suite(
        name="procgen",
        pattern="procgen-multi",
        module=f"{_SUITES}procgen",
        about="Two attempts at a level of one of 16 games",
        extra="procgen",
        requires=("procgen", "gym3"),
        conflict=_PROCGEN_ALONE,
        spaces="64x64 picture; 15 choices",
        tasks="games and levels; test: levels from env.levels on",
        horizon="2 attempts of 500 to 6,000 steps, by game and mode",
        ends="terminated with the last attempt; with one attempt, truncated when time is up",
    ),
    Suite(
        name="procgen",
        pattern="procgen-*",
        module=f"{_SUITES}procgen",
        about="A game whose levels are drawn from numbers",
        placeholder="GAME",
        extra="procgen",
        requires=("procgen", "gym3"),
        conflict=_PROCGEN_ALONE,
        spaces="64x64 picture; 15 choices",
        tasks="levels; test: levels from env.levels on",
        horizon="500 to 6,000 steps, by game and mode",
        ends="terminated with the game; truncated when time is up; with more attempts, terminated with the last",
    ),
    Suite(
        name="atari",
        pattern="atari-multi",
        module=f"{_SUITES}atari",
        about="Many games of the Atari 2600, one in each episode (ALE is under GPL-2.0)",
        extra="atari",
        requires=("ale_py",),
        spaces="84x84 picture; joystick as 18 choices, 5 buttons, or continuous",
        tasks="games; test: the same with other seeds, or games of env.test_games",
        horizon="27,000 steps of 4 frames",
        ends="terminated when the game is over; truncated after env.max_frames frames",
    ),
    Suite(
        name="atari",
        pattern="atari-*",
        module=f"{_SUITES}atari",
        about="A game of the Atari 2600 (ALE is under GPL-2.0)",
        placeholder="GAME",
        extra="atari",
        requires=("ale_py",),
        spaces="84x84 picture; joystick as 18 choices, 5 buttons, or continuous",
        tasks="one game; test: other seeds",
        horizon="27,000 steps of 4 frames",
        ends="terminated when the game is over; truncated after env.max_frames frames",
    ),
    Suite(
        name="retro",
        pattern="retro:*",
        module=f"{_SUITES}retro",
        about="Games of old consoles; bring your own ROM files (env.rom_dir)",
        placeholder="GAME",
        extra="retro",
        requires=("stable_retro",),
        spaces="84x84 picture in a frame that tells the console; 12 buttons",
        tasks="saved states; test: other idle frames, or env.test_states",
        horizon="9,000 steps of 8 frames",
        ends="terminated when the game is over; truncated at the time limit",
    ),
    Suite(
        name="gymnax",
        pattern="gymnax:*",
        module=f"{_SUITES}gymnax_env",
        about="An environment of gymnax, compiled for all actors at once",
        placeholder="NAME",
        extra="jax",
        requires=("gymnax", "six"),
        conflict=_JAX_AND_OTHERS,
        spaces="the environment's own",
        tasks="one; test: other seeds",
        horizon="the environment's own, or env.max_episode_steps",
        ends="terminated as the environment says; truncated at its time limit",
    ),
    Suite(
        name="xland",
        pattern="xland",
        module=f"{_SUITES}xland",
        about="Find out an unseen game's rules, attempt after attempt (XLand-MiniGrid)",
        extra="jax",
        requires=("xminigrid",),
        conflict=_JAX_AND_OTHERS,
        spaces="5x5 cells of 13 tiles and 12 colours, the goal; 6 choices",
        tasks="rulesets; test: a fifth of them, held out",
        horizon="10 attempts of 243 steps",
        ends="terminated after the last attempt, which ends at the goal or at its time limit",
    ),
    Suite(
        name="minigrid",
        pattern="babyai-multi",
        module=f"{_SUITES}minigrid",
        about="Follow an instruction in one of many grid worlds, twice",
        extra="minigrid",
        requires=("minigrid",),
        spaces="7x7 grid in view, direction, mission in words, attempt; 7 actions",
        tasks="65 levels of any seed; train: even seeds, test: odd seeds, or levels of env.test_levels",
        horizon="2 attempts of 16 to 1080 steps, by level",
        ends="terminated with the last attempt, which ends with success or at the level's time limit",
    ),
    Suite(
        name="minigrid",
        pattern="minigrid:*",
        module=f"{_SUITES}minigrid",
        about="A grid world of MiniGrid or BabyAI",
        extra="minigrid",
        requires=("minigrid",),
        spaces="7x7 grid in view, direction, mission as text; 7 actions",
        tasks="layout and mission by seed; train: even seeds, test: odd seeds",
        horizon="by level",
        ends="terminated by success or a loss; truncated at the level's time limit",
    ),
    Suite(
        name="popgym",
        pattern="popgym-multi",
        module=f"{_SUITES}popgym_multi",
        about="One of 27 memory games, which a first attempt without rewards tells",
        extra="popgym",
        requires=("popgym", "mazelib"),
        spaces="30 numbers, 26 actions",
        tasks="27 games; train: even seeds, test: odd seeds",
        horizon="2 attempts of up to 831 steps, by game",
        ends="terminated with the second attempt's end",
    ),
    Suite(
        name="popgym",
        pattern="popgym-*",
        module=f"{_SUITES}popgym",
        about="A game that takes memory, such as RepeatPreviousEasy (16 games at 3 levels)",
        placeholder="GAME",
        extra="popgym",
        requires=("popgym", "mazelib"),
        spaces="numbers (choices one-hot) and time; choices or one number",
        tasks="one game; train: even seeds, test: odd seeds",
        horizon="up to 14 to 1024 steps, by game",
        ends="terminated where the game ends, its time limit included unless env says otherwise",
    ),
    OWN_CLASS,
)
