"""Every environment can be drawn: built-ins by themselves, others by what they observe."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from pipelines.envs import rendering
from pipelines.envs.drawing import BLUE
from pipelines.envs.exploration import random_actions
from pipelines.envs.make import make
from pipelines.envs.suites.catalogue import ENTRIES
from pipelines.envs.task_env import NOTHING, TaskEnv
from pipelines.errors import InputMissing, StageFailed
from tests.envs.contract import play

BUILT_IN = [entry.name for entry in ENTRIES if entry.extra is None and not entry.is_pattern]
PARAMS: dict[str, dict[str, Any]] = {
    "tmaze": {"variant": "active", "corridor": 50},
    "dark-key-door": {"light": True, "shuffle_actions": True},
    "meta-frozen-lake": {"hard": True, "size": 6},
    "mazerunner": {"size": 41, "goals": 12},
    "point-robot": {"goals": "square"},
    "bandit": {"arms": 60, "rewards": "gaussian"},
    "alchemy": {"trials": 2, "end_trial": True},
}
CASES = [(name, {}) for name in BUILT_IN] + list(PARAMS.items())


@pytest.mark.system
@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_every_built_in_draws_itself_and_stays_as_it_was(name: str, params: dict[str, Any]) -> None:
    shown, plain = (make(name, num_envs=3, seed=4, params=params, drawn=True) for _ in range(2))
    rng, observation, expected = np.random.default_rng(0), shown.reset(), plain.reset()
    shapes, pictures, texts = set(), set(), set()
    for _ in range(30):
        picture, text = shown.render("rgb_array", 1), shown.render("ansi", 1)
        assert picture.dtype == np.uint8
        shapes.add(picture.shape)
        pictures.add(picture.tobytes())
        texts.add(text)
        assert text.isascii()
        assert text.isprintable() or "\n" in text
        actions = random_actions(shown.spec.spaces.action, 3, rng)
        result, other = shown.step(actions), plain.step(actions)
        for column in observation:
            np.testing.assert_array_equal(result.observation[column], other.observation[column])
        if (over := result.terminated | result.truncated).any():
            observation, expected = shown.reset(over), plain.reset(over)
    assert len(shapes) == 1
    assert len(shapes.pop()) == 3
    assert len(pictures) > 2
    assert len(texts) > 1
    assert expected.keys() == observation.keys()


def test_the_picture_shows_the_actor_that_is_asked_for() -> None:
    env = make("dark-room", num_envs=2, seed=0, params={"size": 5})
    env.reset()
    env.step(np.array([2, 4]))  # column + 1; stay
    side = env.render("rgb_array", 0).shape[0] // 5
    for actor, column in ((0, 3), (1, 2)):
        _, columns = np.nonzero((env.render("rgb_array", actor) == BLUE).all(-1))
        assert columns.min() // side == columns.max() // side == column
        row = env.render("ansi", actor).split("\n")[2]
        assert row.index("@") == column


def test_the_text_of_a_task_is_that_of_its_name() -> None:
    env = make("goal-frozen-lake", num_envs=1, seed=3)
    env.reset()
    [task] = env.tasks(np.arange(1))
    assert env.render("ansi").replace("@", ".").split("\n") == task.split("/")
    env = make("tmaze", num_envs=1, seed=0, params={"corridor": 4})
    env.reset()
    env.play_only(["goal=+1"])
    env.reset()
    assert env.render("ansi") == "#######\n#####G#\n#@....#\n#####.#\n#######"
    env.step(np.array([0]))
    assert env.render("ansi").split("\n")[2] == "#^@...#"


class Texts(gymnasium.Env):
    """Draws itself as text alone."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> Any:
        return np.array([3, -1], np.float32), 0.0, False, False, {}

    def render(self) -> Any:
        return "ab\ncd\n"


class Numbers(Texts):
    """Does not draw itself."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def render(self) -> Any:
        raise AssertionError("it has no render_mode")


class Images(Numbers):
    """Observes an image."""

    observation_space = gymnasium.spaces.Box(0, 255, (16, 20, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.full((16, 20, 3), 77, np.uint8), {}


class Broken(Texts):
    """Fails to draw itself."""

    def render(self) -> Any:
        raise ValueError("no display")


class Missing(Texts):
    """Needs a package to draw itself."""

    def render(self) -> Any:
        raise gymnasium.error.DependencyNotInstalled("pygame is not installed")


class OneMode(TaskEnv, Texts):
    """A task whose mode is fixed in its class, as `amago init` writes it."""

    render_mode = "ansi"
    task = "only"

    def __init__(self) -> None:
        self.outcome = NOTHING


def shown(name: str) -> tuple[Any, Any]:
    env = make(f"tests.envs.test_rendering:{name}", num_envs=1, seed=0, drawn=True)
    return env, env.reset()


def test_an_environment_of_text_is_shown_as_it_is_and_as_a_picture_of_it() -> None:
    for name in ("Texts", "OneMode"):
        env, observation = shown(name)
        assert rendering.text(env, observation) == "ab\ncd"
        picture = rendering.picture(env, observation)
        assert picture.dtype == np.uint8
        assert len(np.unique(picture)) > 1


def test_an_environment_that_observes_an_image_is_shown_as_that() -> None:
    env, observation = shown("Images")
    assert (rendering.picture(env, observation) == 77).all()
    assert rendering.picture(env, observation).shape == (16, 20, 3)


def test_numbers_are_shown_as_bars() -> None:
    env, observation = shown("Numbers")
    assert "@" not in rendering.text(env, observation)
    result = env.step(np.array([0]))
    picture = rendering.picture(env, result.observation)
    up, down = (picture[:120] == BLUE).all(-1).sum(), (picture[121:, 240:] != picture[0, 0]).any(-1).sum()
    assert up > 10_000  # 3 / (1 + 3) of half the height
    assert down > 5_000


def test_what_goes_wrong_in_a_drawing_is_one_line() -> None:
    env, observation = shown("Broken")
    with pytest.raises(StageFailed, match="failed in render: ValueError: no display"):
        rendering.picture(env, observation)
    env, observation = shown("Missing")
    with pytest.raises(InputMissing, match="needs a package to draw itself: pygame"):
        rendering.picture(env, observation)


def test_registered_environments_draw_themselves_in_a_mode_that_they_have() -> None:
    gymnasium.register("amago-tests/Texts-v0", entry_point=Texts)
    gymnasium.register("amago-tests/Numbers-v0", entry_point=Numbers)
    try:
        env = make("gym:amago-tests/Texts-v0", num_envs=1, seed=0, drawn=True, params={"max_episode_steps": 5})
        assert rendering.text(env, env.reset()) == "ab\ncd"
        env = make("gym:amago-tests/Texts-v0", num_envs=1, seed=0)
        assert env.render("ansi") is None  # it was not made to be drawn
        env = make("gym:amago-tests/Numbers-v0", num_envs=1, seed=0, drawn=True)
        assert rendering.picture(env, env.reset()).shape == (240, 480, 3)
    finally:
        for name in ("Texts", "Numbers"):
            del gymnasium.registry[f"amago-tests/{name}-v0"]


def test_attempts_are_drawn_as_what_is_attempted() -> None:
    env = make("tests.envs.test_rendering:Texts", num_envs=1, seed=0, drawn=True, params={"attempts": 2})
    env.reset()
    assert env.render("ansi") == "ab\ncd\n"


def test_pygame_draws_gymnasium_s_own() -> None:
    pytest.importorskip("pygame", reason="pygame is not installed")
    env = make("gym:CartPole-v1", num_envs=2, seed=0, drawn=True)
    first = rendering.picture(env, env.reset(), 0)
    rows = play(env, 5)
    assert first.shape == (400, 600, 3)
    assert (rendering.picture(env, rows[-1], 0) != first).any()
