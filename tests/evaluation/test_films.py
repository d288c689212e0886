"""A film shows episodes of the evaluation itself, and filming changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.envs import rendering
from pipelines.envs.make import make
from pipelines.evaluation.films import Film, PictureReel, film_episodes
from pipelines.evaluation.runner import evaluate
from pipelines.rollout.policies import RandomPolicy
from tests.tiers import some


def playing(num_envs: int, name: str = "meta-frozen-lake", params: dict | None = None):
    env = make(name, num_envs=num_envs, seed=5, split="test", params=params or {"attempts": 3})
    return env, RandomPolicy(env.spec.spaces.action, seed=3)


@pytest.mark.system
@pytest.mark.parametrize(
    ("num_envs", "wanted"), [(4, [0, 1, 2]), (2, [0, 1, 2, 3, 4]), (3, [5])], ids=["few", "more than actors", "later"]
)
def test_films_are_episodes_of_the_evaluation(num_envs: int, wanted: list[int]) -> None:
    results = evaluate(*playing(num_envs), episodes=8)
    films = film_episodes(*playing(num_envs), rendering.picture, episodes=wanted)
    for number, each in zip(wanted, films, strict=True):
        assert each.task == results.tasks[number]
        assert each.length == results.lengths[number]
        assert sum(each.rewards) == pytest.approx(results.returns[number])
        assert len(each.frames) == len(each.attempt) == len(each.solved) == each.length + 1
        assert each.attempt[0] == 1
        assert each.attempt[-1] == 3
        assert each.solved[-1] == results.attempts[number].sum()


def test_the_frames_are_those_of_the_steps() -> None:
    env, policy = playing(1, "dark-room", {"size": 5, "attempts": 1, "attempt_steps": 6})
    [shown] = film_episodes(env, policy, rendering.text, episodes=[0], reel=list)
    env, policy = playing(1, "dark-room", {"size": 5, "attempts": 1, "attempt_steps": 6})
    observation, expected = env.reset(), []
    expected.append(env.render("ansi"))
    previous, reward = np.zeros(1, np.int32), np.zeros(1, np.float32)
    for step in range(6):
        previous = policy.act(observation, previous, reward, np.array([step]))
        observation = env.step(previous).observation
        expected.append(env.render("ansi"))
    assert shown.frames == expected


def test_a_reel_gives_back_its_pictures_in_the_size_of_the_first() -> None:
    reel, rng = PictureReel(), np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (6, 8, 3), dtype=np.uint8) for _ in range(5)]
    for picture in pictures:
        reel.append(picture)
    reel.append(np.full((9, 4, 3), 200, np.uint8))
    assert len(reel) == 6
    for picture, other in zip(pictures, reel, strict=False):
        np.testing.assert_array_equal(picture, other)
    assert reel[5].shape == (6, 8, 3)
    assert (reel[5][:, :4] == 200).all()
    assert (reel[5][:, 4:] == 0).all()
    reel.close()


@pytest.mark.parametrize(("width", "length"), some([(84, 3), (480, 1001)], 0))
def test_captions_stand_below_and_keep_their_size(width: int, length: int) -> None:
    picture = np.full((50, width, 3), 99, np.uint8)
    rewards = [-1234.5 if step % 2 else 0.25 for step in range(length)]
    shown = Film(
        frames=[picture] * (length + 1), rewards=rewards, attempt=[12] * (length + 1), solved=[1] * (length + 1)
    )
    shown.values = np.linspace(-1e5, 1e5, length)
    frames = list(shown.add_captions(has_success=True, attempts=100))
    assert len(frames) == length + 1
    assert len({frame.shape for frame in frames}) == 1
    times = frames[0].shape[1] // width
    assert (frames[0][: 50 * times] == 99).all()
    assert (frames[0] != frames[1]).any()
    assert all((frame[50 * times :].max(axis=(0, 2)) > 200).sum() > 50 for frame in frames)


@pytest.mark.parametrize(("length", "fps"), [(5, 4), (160, 10), (100_000, 30)])
def test_videos_take_about_a_quarter_of_a_minute(length: int, fps: int) -> None:
    assert Film(frames=[], rewards=[0.0] * length).fps == fps
