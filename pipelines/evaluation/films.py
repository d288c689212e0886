"""Episodes as they were played, step by step: frames, rewards, attempts, and the agent's values.

A `_Camera` is an environment that draws another one's first episodes. It draws after each step and changes nothing, so
what is filmed is what would have been played without it.
"""

from __future__ import annotations

import io
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipelines.envs.drawing import GLYPH, INK, WHITE, Canvas, enlarge
from pipelines.envs.env import Env, StepResult
from pipelines.envs.scenes import WIDTH
from pipelines.evaluation.values import Values
from pipelines.events import Listener, Progress, silent
from pipelines.files.atomic import explain_errors
from pipelines.lake.schema import Schema
from pipelines.lake.trajectory import Trajectories, Trajectory
from pipelines.rollout.episodes import Episode
from pipelines.rollout.group import Memory
from pipelines.rollout.policies import Policy
from pipelines.rollout.rollout import Recording, Rollout

Drawing = Callable[[Env, Mapping[str, np.ndarray], int], Any]
_SECONDS, _FPS = 16, (4, 30)
_CELL = 12  # letters of a figure in a caption
_MARGIN, _LINE_GAP = 4, 6  # pixels of a caption, at scale 1


class PictureReel(Sequence[np.ndarray]):
    """Pictures of one size, compressed in a temporary file: an episode may have thousands."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (it is closed with the reel)
        self._places: list[tuple[int, int]] = []
        self._shape: tuple[int, ...] | None = None

    def append(self, picture: np.ndarray) -> None:
        """Add a picture; one of another size than the first is cut or filled with black."""
        if self._shape is None:
            self._shape = picture.shape
        if picture.shape != self._shape:
            whole = np.zeros(self._shape, dtype=np.uint8)
            height, width = np.minimum(picture.shape[:2], self._shape[:2])
            whole[:height, :width] = picture[:height, :width]
            picture = whole
        with explain_errors("store the frames of a video"):
            start = self._file.seek(0, io.SEEK_END)
            self._places.append((start, self._file.write(zlib.compress(picture.tobytes(), 1))))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Any) -> Any:
        assert self._shape is not None
        start, size = self._places[place]
        self._file.seek(start)
        return np.frombuffer(zlib.decompress(self._file.read(size)), dtype=np.uint8).reshape(self._shape)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


@dataclass(kw_only=True)
class Film:
    """An episode of T steps: T + 1 `frames`, T `rewards`; with each frame the `attempt` that it shows, from 1, and how
    many have `solved` the task so far. `values`: the agent's estimate at each of the T steps; None if it has none.
    """

    frames: Any
    task: str = ""
    rewards: list[float] = field(default_factory=list)
    attempt: list[int] = field(default_factory=lambda: [1])
    solved: list[int] = field(default_factory=lambda: [0])
    over: bool = False
    values: np.ndarray | None = None

    @property
    def length(self) -> int:
        """T, the number of steps."""
        return len(self.rewards)

    @property
    def fps(self) -> int:
        """Frames a second that make a video of about a quarter of a minute, within bounds."""
        return int(np.clip(round(self.length / _SECONDS), *_FPS))

    def add_captions(self, *, has_success: bool, attempts: int | None) -> Iterator[np.ndarray]:
        """Yield the frames of a video: each picture with attempt, step, reward, return and value beneath it."""

        def fit(text: str, shorter: str) -> str:
            return text if len(text) <= _CELL else shorter

        returns = np.cumsum([0.0, *self.rewards])
        for number, picture in enumerate(self.frames):
            value = self.values[number] if self.values is not None and number < self.length else None
            attempt = f"attempt {self.attempt[number]}"
            paid = self.rewards[number - 1] + 0.0 if number else 0.0  # no -0
            cells = [
                fit(f"step {number}/{self.length}", f"step {number}"),
                "" if attempts == 1 else fit(f"{attempt}/{attempts}" if attempts else attempt, attempt),
                f"solved {self.solved[number]}" if has_success else "",
                fit(f"reward {paid:+.2f}", f"reward {paid:.3g}"),
                fit(f"return {returns[number]:.2f}", f"return {returns[number]:.4g}"),
                "" if value is None else fit(f"value {value:.2f}", f"value {value:.3g}"),
            ]
            shown = enlarge(picture, WIDTH // 2 + 1)
            yield np.concatenate([shown, self._draw_caption(cells, shown.shape[1])])

    @staticmethod
    def _draw_caption(cells: Sequence[str], width: int) -> np.ndarray:
        """Draw a strip with the cells in two rows of three."""
        rows, columns = (cells[:3], cells[3:]), 3
        scale = int(np.clip(width // (columns * _CELL * (GLYPH[1] + 1)), 1, 3))
        line = (GLYPH[0] + _LINE_GAP) * scale
        canvas = Canvas(line * len(rows) + _LINE_GAP * scale, width, INK)
        for number, row in enumerate(rows):
            for place, cell in enumerate(row):
                canvas.text(
                    cell,
                    _MARGIN * scale + place * width // columns,
                    _LINE_GAP * scale + line * number,
                    WHITE,
                    scale=scale,
                )
        return canvas.pixels


class _Camera(Env):
    """`env`, whose episodes with these numbers become `films`, with frames that `drawing` makes."""

    def __init__(
        self, env: Env, drawing: Drawing, *, episodes: Sequence[int], reel: Callable[[], Any] = PictureReel
    ) -> None:
        self.env, self.spec, self.num_envs, self.episodes = env, env.spec, env.num_envs, env.episodes
        self.films: dict[int, Film] = {}
        self._drawing, self._wanted, self._reel = drawing, episodes, reel
        self._filmed: dict[int, Film] = {}  # by actor

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        observation = self.env.reset(mask)
        begun = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        for actor in begun.tolist():
            self._filmed.pop(actor, None)
            number = int(self.episodes.current[actor])
            if number in self._wanted:
                film = Film(frames=self._reel(), task=self.env.tasks(np.array([actor]))[0])
                film.frames.append(self._drawing(self.env, observation, actor))
                self.films[number] = self._filmed[actor] = film
        return observation

    def step(self, actions: np.ndarray) -> StepResult:
        result = self.env.step(actions)
        for actor, film in self._filmed.items():
            if film.over:
                continue
            film.over = bool(result.terminated[actor] or result.truncated[actor])
            film.frames.append(self._drawing(self.env, result.observation, actor))
            film.rewards.append(float(result.reward[actor]))
            ended = bool(result.attempt_end[actor]) and not film.over
            film.attempt.append(film.attempt[-1] + ended)
            film.solved.append(film.solved[-1] + bool(result.success[actor]))
        return result

    @property
    def done(self) -> bool:
        """Whether all episodes that are wanted have ended."""
        return len(self.films) == len(self._wanted) and all(film.over for film in self.films.values())

    def tasks(self, indices: np.ndarray) -> list[str]:
        return self.env.tasks(indices)

    def goal_texts(self, indices: np.ndarray) -> list[str]:
        return self.env.goal_texts(indices)

    def seeds(self, indices: np.ndarray) -> Sequence[int | None]:
        return self.env.seeds(indices)

    def achieved(self, indices: np.ndarray) -> np.ndarray:
        return self.env.achieved(indices)

    def close(self) -> None:
        self.env.close()


def film_episodes(
    env: Env,
    policy: Policy,
    drawing: Drawing,
    *,
    episodes: Sequence[int],
    values: Values | None = None,
    listener: Listener = silent,
    reel: Callable[[], Any] = PictureReel,
    memory: Memory = "episode",
) -> list[Film]:
    """Play `env` (fresh: not reset before) until the episodes with these numbers have ended; return their films.

    With the policy, seed and number of actors of an evaluation, they are episodes of it. Errors as `evaluate`.
    """
    camera = _Camera(env, drawing, episodes=episodes, reel=reel)
    played: list[Trajectory] = []
    numbers: list[int] = []

    def keep(trajectories: Trajectories) -> None:
        played.extend(trajectories)

    def note(episode: Episode) -> None:
        numbers.append(episode.number)
        if episode.number not in episodes:
            played[len(numbers) - 1] = Trajectory({}, played[len(numbers) - 1].info)  # frees its steps

    rollout = Rollout(camera, policy, recording=Recording(sink=keep), on_episode=note, memory=memory)
    while not camera.done:
        rollout.step()
        done = sum(each.over for each in camera.films.values())
        listener(Progress(stage="video", done=done, total=len(episodes), unit="episodes"))
    rollout.settle()
    if values is not None:
        schema = Schema(env.spec.spaces)
        for number, trajectory in zip(numbers, played, strict=True):
            if number in camera.films:
                camera.films[number].values = values(trajectory, schema)["v"][:, -1]
    return [camera.films[number] for number in episodes]
