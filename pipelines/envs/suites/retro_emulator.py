"""One console emulator in a process of its own.

stable-retro runs one emulator a process, and a crash of one takes its process along. The process receives pickled
requests over the socket whose number it is given and answers each; it ends with the process at the other end.
"""

from __future__ import annotations

import colorsys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

BUTTONS, _FRAME = 12, 2
# Names that stable-retro gives to consoles; each has its own colour, evenly apart on the wheel of hues.
_NAMED = (
    "32x Atari2600 FBNeo GameBoy GameGear GbAdvance GbColor Genesis N64 Nes NintendoDs PCEngine SCD Saturn Sms Snes"
)
CONSOLES = tuple(_NAMED.split())
_UNKNOWN = (128, 128, 128)


@dataclass(frozen=True, kw_only=True)
class Cartridge:
    """What a process is to play. `rom`: the file to play, None: that of the package's own folder."""

    game: str
    rom: str | None
    size: int
    frame_skip: int
    max_frames: int


def choose_color(console: str) -> tuple[int, int, int]:
    """Choose the colour of the frame around the pictures of `console`."""
    if console not in CONSOLES:
        return _UNKNOWN
    red, green, blue = colorsys.hsv_to_rgb(CONSOLES.index(console) / len(CONSOLES), 1.0, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


@lru_cache(maxsize=8)
def _areas(size: int, length: int) -> np.ndarray:
    """Compute which share of each of `length` pixels falls into each of `size` equal parts: (size, length) float32."""
    edges = np.linspace(0, length, size + 1)
    pixels = np.arange(length)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (np.clip(overlap, 0, None) * size / length).astype(np.float32)


def draw(screen: np.ndarray, size: int, frame: Sequence[int]) -> np.ndarray:
    """Average a screen (height, width, 3) over areas, inside a frame of 2 pixels: (size, size, 3) uint8."""
    inner = size - 2 * _FRAME
    rows, columns = _areas(inner, screen.shape[0]), _areas(inner, screen.shape[1])
    shrunk = np.einsum("yh,hwc,xw->yxc", rows, screen.astype(np.float32), columns, optimize=True)
    out = np.empty((size, size, 3), dtype=np.uint8)
    out[:] = frame
    out[_FRAME:-_FRAME, _FRAME:-_FRAME] = np.rint(shrunk)
    return out


class _Emulator:
    """A game, stepped `frame_skip` frames at a time. Answers are (picture, reward, terminated, truncated)."""

    def __init__(self, cartridge: Cartridge) -> None:
        import stable_retro

        self.cartridge = cartridge
        data = stable_retro.data
        self._source = data.Integrations.STABLE
        if cartridge.rom is not None:  # the package looks for `rom.EXTENSION` in folders named after games
            self._folder = tempfile.TemporaryDirectory(prefix="amago-rom-")
            link = Path(self._folder.name) / cartridge.game / f"rom{Path(cartridge.rom).suffix.lower()}"
            link.parent.mkdir()
            link.symlink_to(cartridge.rom)
            data.Integrations.add_custom_path(self._folder.name)
            self._source = data.Integrations.CUSTOM
        self._env = stable_retro.RetroEnv(cartridge.game, inttype=self._source, render_mode="rgb_array")
        self._frame = choose_color(self._env.system)
        self._idle = np.zeros(self._env.num_buttons, dtype=np.int8)

    def reset(self, state: str, idle_frames: int) -> tuple[np.ndarray, float, bool, bool]:
        """Begin the game from a saved state, after some frames in which nothing is pressed."""
        if state:
            self._env.load_state(state, self._source)
        screen, _ = self._env.reset()
        self._frames = 0
        for _ in range(idle_frames):
            screen, _, over, _, _ = self._env.step(self._idle)
            if over:
                screen, _ = self._env.reset()
                break
        return draw(screen, self.cartridge.size, self._frame), 0.0, False, False

    def step(self, buttons: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        """Press `buttons` (12,) of the console, in its order; those beyond its own mean nothing."""
        pressed, total, over = self._idle.copy(), 0.0, False
        count = min(len(pressed), BUTTONS)
        pressed[:count] = buttons[:count]
        for _ in range(self.cartridge.frame_skip):
            screen, reward, over, _, _ = self._env.step(pressed)
            total += float(reward)
            self._frames += 1
            if over or self._frames >= self.cartridge.max_frames:
                break
        late = self._frames >= self.cartridge.max_frames and not over
        return draw(screen, self.cartridge.size, self._frame), total, bool(over), late


def serve(descriptor: int) -> None:
    """Answer requests (method, arguments) on a socket until its other end is closed; the first brings the cartridge."""
    connection = Connection(descriptor)
    emulator: Any = None
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            if method == "begin":
                emulator, answer = _Emulator(*arguments), None
            else:
                answer = getattr(emulator, method)(*arguments)
        except Exception as error:  # the other end reports it
            connection.send((f"{type(error).__name__}: {error}", None))
            return
        connection.send((None, answer))
