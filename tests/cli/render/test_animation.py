from __future__ import annotations

import io

import pytest

from amago_cli.render.animation import Animation, animation
from pipelines.envs.env import EnvSpec
from pipelines.evaluation.films import Film
from pipelines.lake.spaces import Discrete, Spaces
from pipelines.stages.filming import WatchedEpisode


def shown(sleep) -> tuple[Animation, io.StringIO]:
    stream = io.StringIO()
    animation = Animation(text="a\n\nb", frames=["one\ntwo", "three", "four\nfive\nsix"], speed=4.0)
    animation.play(stream, sleep=sleep)
    return animation, stream


def test_each_frame_replaces_the_one_before_at_the_speed_asked_for() -> None:
    slept: list[float] = []
    _, stream = shown(slept.append)
    assert slept == [0.25, 0.25]
    text = stream.getvalue()
    assert text.index("two\n\x1b[2A\r\x1b[Jthree\n\x1b[1A\r\x1b[Jfour") > 0
    assert text.startswith("\x1b[?25l\x1b[?7l")
    assert text.endswith("six\n\x1b[?7h\x1b[?25h")


def test_an_interrupt_leaves_the_terminal_as_it_was() -> None:
    stream = io.StringIO()

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Animation(text="", frames=["one", "two"], speed=1.0).play(stream, sleep=interrupted)
    assert stream.getvalue().endswith("one\n\x1b[?7h\x1b[?25h")


def test_of_an_environment_s_text_only_colors_reach_the_terminal() -> None:
    drawn = "\x1b[43mtaxi\x1b[0m\nroad\x1b[2J\x07"
    film = Film(frames=[drawn], task="task\x1b[2J")
    spec = EnvSpec(name="env", spaces=Spaces(observation={}, action=Discrete(n=2)))
    shown = animation(WatchedEpisode(film=film, spec=spec, update=3), episode=0, speed=1.0)
    assert "\x1b[43mtaxi\x1b[0m\nroad" in shown.frames[0]
    assert "\x1b[2J" not in shown.frames[0]
    assert "\x07" not in shown.frames[0]
    assert "taxi\nroad" in shown.text


def test_a_frame_that_is_higher_than_the_terminal_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "5")
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    frames = ["\n".join(str(line) for line in range(50))] * 2
    Animation(text="", frames=frames, speed=1.0).play(stream, sleep=lambda seconds: None)
    assert "\x1b[4A" in stream.getvalue()
    assert "\n4\n" not in stream.getvalue()
