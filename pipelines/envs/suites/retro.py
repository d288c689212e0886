"""`retro:GAME`: games of consoles of the eighties and nineties, in stable-retro's emulators.

Games are deterministic, so an episode begins with some idle frames, an even number of them in training and an odd one
in tests, or in saved states. ROM files are recognised by their SHA-1. Every actor's emulator is a process of its own
(`retro_emulator`).
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import stable_retro
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.env import EnvSpec, EpisodeEnv, StepResult, unknown_task
from pipelines.envs.suites.retro_emulator import BUTTONS, Cartridge
from pipelines.errors import InputMissing, StageFailed, UsageError
from pipelines.lake.spaces import Box, MultiBinary, Spaces
from pipelines.nearest import did_you_mean
from pipelines.processes import end_process, start_python

PREFIX, VERSION = "retro:", "-v0"
STATE, _IDLE, _ORDER = range(3)  # purposes of random draws
_STABLE = stable_retro.data.Integrations.STABLE
_PATIENCE_SECONDS = 60.0


class _RetroSettings(SettingsModel):
    """Parameters of `retro:GAME`."""

    rom_dir: Path | None = None
    """Folder with your ROM files, at any depth and under any name; unset: the games of the package."""
    states: tuple[str, ...] = ()
    """Saved states (levels) to begin in, each as likely; empty: the game's default one."""
    test_states: tuple[str, ...] = ()
    """Saved states for `split = "test"`; empty: those of training."""
    frame_skip: int = Field(8, ge=1)
    """Frames for which buttons are pressed."""
    max_frames: int = Field(72_000, ge=1)
    """Frames after which an episode is truncated (72,000: 20 minutes)."""
    idle_frames: int = Field(30, ge=1)
    """Most frames at an episode's beginning in which nothing is pressed; their number is random."""
    size: int = Field(84, ge=16, le=256)
    """Height and width of the picture, with its frame."""

    @property
    def horizon(self) -> int:
        return -(-self.max_frames // self.frame_skip)


class Retro(EpisodeEnv):
    """N actors, an emulator process each; all processes step at the same time."""

    Settings = _RetroSettings

    def __init__(self, name: str, settings: _RetroSettings, *, num_envs: int, seed: int, split: str) -> None:
        super().__init__(name, num_envs=num_envs, seed=seed, split=split)
        s = self.settings = settings
        wanted, games = name.removeprefix(PREFIX), stable_retro.data.list_games(_STABLE)
        game = next((known for known in (wanted, wanted + VERSION) if known in games), None)
        if game is None:
            some = f"{len(games)} are known, such as {PREFIX}{games[0]}"
            hint = did_you_mean(wanted, games, prefix=PREFIX, otherwise=some)
            raise UsageError(f"stable-retro knows no game '{wanted}'", hint=hint)
        self._cartridge = Cartridge(
            game=game,
            rom=_find_rom(name, game, s.rom_dir),
            size=s.size,
            frame_skip=s.frame_skip,
            max_frames=s.max_frames,
        )
        self.states = self._playing = _choose_states(name, game, s, split)
        self.spec = EnvSpec(
            name=name,
            spaces=Spaces(
                observation={"obs": Box(shape=(s.size, s.size, 3), dtype="uint8")}, action=MultiBinary(n=BUTTONS)
            ),
            horizon=s.horizon,
            about=f"{game.removesuffix(VERSION)}, {s.horizon} steps of {s.frame_skip} frames",
            split=f"saved states {', '.join(s.test_states)} to test" if s.test_states else "other idle frames",
        )
        self._processes: list[_Process | None] = [None] * num_envs
        self._tasks = [""] * num_envs
        self._shown = np.zeros((num_envs, s.size, s.size, 3), dtype=np.uint8)

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        indices, episodes = self._advance(mask)
        chosen = self._choose(episodes, STATE, len(self._playing))
        idle = 2 * self.draws.integers(episodes, _IDLE, (self.settings.idle_frames + 1) // 2) + self._test
        shown = self._shown.copy()
        for actor, state, frames in zip(indices.tolist(), chosen.tolist(), idle.tolist(), strict=True):
            if self._processes[actor] is None:
                self._processes[actor] = _Process(self.spec.name, self._cartridge)
            self._tasks[actor] = self._playing[state]
            self._process(actor).send("reset", self._playing[state], frames)
        for actor in indices.tolist():
            shown[actor] = self._process(actor).receive()[0]
        self._shown = shown
        return {"obs": shown}

    def step(self, actions: np.ndarray) -> StepResult:
        shown = np.empty_like(self._shown)
        reward = np.empty(self.num_envs, dtype=np.float32)
        terminated, truncated = np.zeros((2, self.num_envs), dtype=bool)
        for actor, buttons in enumerate(np.asarray(actions, dtype=np.int8)):
            self._process(actor).send("step", buttons)
        for actor in range(self.num_envs):
            shown[actor], reward[actor], terminated[actor], truncated[actor] = self._process(actor).receive()
        self._shown = shown
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
        """Name the saved state; the game where it has none."""
        return [self._tasks[i] or self._cartridge.game for i in indices.tolist()]

    def play_only(self, tasks: Sequence[str]) -> None:
        names = {state or self._cartridge.game: state for state in self.states}
        for name in tasks:
            if name not in names:
                raise unknown_task(name, self.spec.name, hint=f"its tasks: {', '.join(names)}; see env.states")
        self._playing, self._in_turn = tuple(names[name] for name in tasks), True

    def play_evenly(self) -> None:
        self._playing, self._in_turn = self.draws.shuffle(self.states, _ORDER), True

    def close(self) -> None:
        for process in self._processes:
            if process is not None:
                process.end()
        self._processes = [None] * self.num_envs

    def _process(self, actor: int) -> _Process:
        process = self._processes[actor]
        assert process is not None, "reset comes first"
        return process


class _Process:
    """An emulator process and this end of its socket."""

    def __init__(self, name: str, cartridge: Cartridge) -> None:
        self._name = name
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_python(
                f"from pipelines.envs.suites.retro_emulator import serve; serve({theirs.fileno()})",
                descriptors=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        self.send("begin", cartridge)
        self.receive()

    def send(self, method: str, *arguments: Any) -> None:
        try:
            self._connection.send((method, arguments))
        except OSError as error:
            raise self._gone() from error

    def receive(self) -> Any:
        try:
            problem, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if problem is not None:
            raise StageFailed(f"environment '{self._name}' failed: {problem}")
        return answer

    def _gone(self) -> StageFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_SECONDS)
        return StageFailed(f"environment '{self._name}': its emulator ended with exit code {self._process.returncode}")

    def end(self) -> None:
        self._connection.close()
        end_process(self._process, _PATIENCE_SECONDS)


def _find_rom(name: str, game: str, folder: Path | None) -> str | None:
    """Find the ROM file in `folder`; None where the package itself has one. InputMissing where there is none."""
    data = stable_retro.data
    if folder is None:
        try:
            data.get_original_romfile_path(game, _STABLE)
        except FileNotFoundError as error:
            raise InputMissing(
                f"environment '{name}': there is no ROM of {game}",
                hint="set env.rom_dir to a folder with your ROM files; stable-retro brings Airstriker-Genesis-v0 only",
            ) from error
        return None
    if not folder.is_dir():
        raise InputMissing(f"environment '{name}': env.rom_dir '{folder}' is not a folder")
    hashes = Path(data.get_file_path(game, "rom.sha", _STABLE)).read_text().split()
    endings = set(data.EMU_EXTENSIONS)
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in endings and file.is_file())
    for file in files:
        with file.open("rb") as opened, contextlib.suppress(ValueError):
            if data.groom_rom(str(file), opened)[1] in hashes:
                return str(file.resolve())
    raise InputMissing(
        f"environment '{name}': none of the {len(files)} ROM files in '{folder}' is {game}",
        hint=f"its SHA-1 is {' or '.join(hashes)}",
    )


def _choose_states(name: str, game: str, settings: _RetroSettings, split: str) -> tuple[str, ...]:
    """Choose the saved states in which episodes of `split` begin; ("",) for the game's own beginning."""
    known = stable_retro.data.list_states(game, _STABLE)
    for state in (*settings.states, *settings.test_states):
        if state not in known:
            raise UsageError(
                f"environment '{name}': the game has no saved state '{state}'",
                hint=f"states: {', '.join(known) or 'none'}",
            )
    both = sorted({*settings.states} & {*settings.test_states})
    if both:
        raise UsageError(f"environment '{name}': states both of training and of test: {', '.join(both)}")
    if split == "test" and settings.test_states:
        return settings.test_states
    if settings.states:
        return settings.states
    path = stable_retro.data.get_file_path(game, "metadata.json", _STABLE)
    default = json.loads(Path(path).read_text()).get("default_state") if path else None
    return (default or "",)
