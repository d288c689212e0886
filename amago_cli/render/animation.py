"""Episodes played in a terminal, a frame a step; elsewhere the same frames one after another."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from amago_cli.render import escaping
from amago_cli.render.output import Document

if TYPE_CHECKING:
    from pipelines.stages.filming import WatchedEpisode

_COLOR = re.compile(r"\x1b\[[0-9;]{0,40}m")
# The cursor is hidden, and long lines are cut instead of wrapped.
_BEGIN, _END, _CLEAR, _UP = "\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h", "\x1b[J", "\x1b[{}A"


@dataclass(frozen=True, kw_only=True)
class Animation(Document):
    """A document whose `frames` are shown in turn on a terminal; `speed`: frames per second."""

    frames: Sequence[str]
    speed: float

    def play(self, stream: TextIO, sleep: Callable[[float], object] = time.sleep) -> None:
        """Draw each frame over the one before. The cursor is back at the end, also after Ctrl-C."""
        drawn = 0
        stream.write(_BEGIN)
        try:
            for number, frame in enumerate(self.frames):
                if number:
                    sleep(1 / self.speed)
                rows = shutil.get_terminal_size().lines - 1
                lines = frame.split("\n")[:rows]
                stream.write((_UP.format(drawn) if drawn else "") + "\r" + _CLEAR + "\n".join(lines) + "\n")
                stream.flush()
                drawn = len(lines)
        finally:
            stream.write(_END)
            stream.flush()


def animation(watched: WatchedEpisode, *, episode: int, speed: float) -> Animation:
    """Build the frames of an episode, each with a line about its step, and its figures by step for scripts."""
    film, spec, total = watched.film, watched.spec, 0.0
    frames, colored, steps = [], [], []
    for step, drawn in enumerate(film.frames):
        reward = film.rewards[step - 1] if step else 0.0
        total += reward
        value = float(film.values[step]) if film.values is not None and step < film.length else None
        attempt = f"attempt {film.attempt[step]}" + (f"/{spec.num_attempts}" if spec.num_attempts else "")
        parts = [f"step {step}/{film.length}"]
        parts += [attempt] if spec.num_attempts != 1 else []
        parts += [f"solved {film.solved[step]}"] if spec.has_success else []
        parts += [f"reward {reward:+.3g}", f"return {total:.4g}"]
        parts += [f"value {value:.3g}"] if value is not None else []
        frames.append(f"{'  '.join(parts)}\n{_COLOR.sub('', drawn)}")
        # What an environment draws is untrusted: colours stay, and other control characters become escapes.
        between, colors = map(escaping.lines, _COLOR.split(drawn)), [*_COLOR.findall(drawn), ""]
        safe = "".join(part + color for part, color in zip(between, colors, strict=True))
        colored.append(f"{'  '.join(parts)}\n{safe}")
        figures: dict[str, Any] = {"step": step, "attempt": film.attempt[step], "solved": film.solved[step]}
        steps.append({**figures, "reward": reward, "return": total, "value": value, "text": drawn})
    title = f"{spec.name}, checkpoint {watched.update}, episode {episode}: {film.task}"
    heading = escaping.line(title[:200])
    return Animation(
        text="\n\n".join([heading, *frames]),
        fields={"metrics": {"return": total, "length": film.length, "episode": episode}, "steps": steps},
        frames=[f"{heading}\n{frame}" for frame in colored],
        speed=speed,
    )
