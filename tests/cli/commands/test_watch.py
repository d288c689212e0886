from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Amago, call, tiny


@pytest.fixture(scope="module")
def _room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("watched") / "room"
    env = ("--set", "env.size=3", "--set", "env.attempts=2", "--set", "env.attempt_steps=4")
    made = call("collect", "--env", "dark-room", *env, "--run", run, "--steps", 100, "--actors", 4, "-q")
    assert made.code == 0, made.err
    assert call("train", "--from-lake", run, "--steps", 2, "--encoder", "feedforward", *tiny(), "-q").code == 0
    return run


@pytest.fixture
def room(_room: Path, amago: Amago, tmp_path: Path) -> Path:
    shutil.copytree(_room, tmp_path / "room", symlinks=True)
    return Path("room")


@pytest.mark.system
def test_without_a_terminal_the_frames_follow_one_another(amago: Amago, room: Path) -> None:
    done = amago("watch", room)
    assert done.code == 0, done.err
    assert done.out.startswith("dark-room, checkpoint 2, episode 0: goal=")
    frames = done.out.split("\n\n")[1:]
    assert len(frames) == 9
    assert all(frame.count("@") == 1 for frame in frames)
    assert frames[0].startswith("step 0/8  attempt 1/2  solved 0  reward +0  return 0  value ")
    assert frames[8].startswith("step 8/8  attempt 2/2")
    assert "\x1b" not in done.out


def test_json_has_every_step(amago: Amago, room: Path) -> None:
    done = amago("watch", room, "--episode", 3, "--output", "json").json
    assert [step["step"] for step in done["steps"]] == list(range(9))
    assert done["steps"][-1]["return"] == done["metrics"]["return"] == sum(step["reward"] for step in done["steps"])
    assert done["steps"][0]["text"].count("\n") == 2
    assert done["metrics"]["episode"] == 3


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere"], 3, "no run at 'nowhere'"),
        (["room", "--checkpoint", "99"], 3, "99"),
        (["room", "--env", "tmaze"], 3, "other spaces"),
        (["room", "--speed", "0"], 2, "--speed"),
        (["room", "--episode", "-1"], 2, "--episode"),
    ],
)
def test_mistakes_are_named(amago: Amago, room: Path, arguments: list[str], code: int, words: str) -> None:
    failed = amago("watch", *arguments)
    assert failed.code == code, failed.err
    assert words in failed.err
    assert "Traceback" not in failed.err


def test_an_environment_without_text_is_shown_in_letters(amago: Amago, small: Path) -> None:
    pytest.importorskip("pygame", reason="pygame is not installed")
    done = amago("watch", small)
    assert done.code == 0, done.err
    assert done.out.startswith("gym:CartPole-v1, checkpoint 3, episode 0: ")
