"""Videos of an evaluation: they never change its scores, and their absence costs no run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.envs.suites.dark_room import DarkRoom
from pipelines.errors import InputMissing, StageFailed
from pipelines.evaluation.values import Values
from pipelines.events import Event, Notice
from pipelines.formats import video_writer
from pipelines.lake import reading
from pipelines.lake.store import Lake
from pipelines.stages import collect, evaluate, filming, train
from pipelines.stages import run as chain
from tests.stages.recipes import tiny

ENV = {"name": "dark-room", "size": 3, "attempts": 2, "attempt_steps": 4}
SAMPLED = {"greedy": False, "actors": 4, "episodes": 6}


@pytest.fixture(scope="module")
def _run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings, run = tiny(env=ENV), tmp_path_factory.mktemp("filmed") / "run"
    collect.run(settings, run=run)
    train.run(settings, run=run, lakes=[(run / "lake", 1.0)])
    return run


@pytest.fixture
def run(_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_run, tmp_path / "run", symlinks=True))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[np.ndarray]]:
    """The frames of each video, which the tests of the writer read back from files."""
    found: dict[str, list[np.ndarray]] = {}

    def write(path: Path, frames: Any, fps: int) -> Path:
        found[path.name] = list(frames)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"a video")
        return path

    monkeypatch.setattr(filming, "write_video", write)
    monkeypatch.setattr(filming, "choose_suffix", lambda: ".mp4")
    return found


def figures(path: Path) -> dict[str, Any]:
    report = json.loads(path.read_text())
    return {"metrics": report["metrics"], "known": report["known"]}


@pytest.mark.system
@pytest.mark.parametrize("how", [{"actors": 4, "episodes": 6}, SAMPLED], ids=["greedy", "sampled"])
def test_scores_are_the_same_to_the_bit_with_and_without_videos(
    run: Path, written: dict[str, list[np.ndarray]], how: dict[str, Any]
) -> None:
    plain = evaluate.run(tiny(env=ENV, evaluate=how), run=run)
    without = figures(plain.outputs[0])
    plain.outputs[0].unlink()
    filmed = evaluate.run(tiny(env=ENV, evaluate={**how, "video": 2}), run=run)
    assert filmed.outputs[0] == plain.outputs[0]  # the same evaluation
    assert figures(filmed.outputs[0]) == without
    names = [path.name for path in filmed.outputs[1:]]
    assert names == [f"{plain.outputs[0].stem}-{episode}.mp4" for episode in (0, 1)]
    assert [len(written[name]) for name in names] == [9, 9]  # eight steps, and the first observation
    assert filmed.outputs[1].parent == run / "videos"


@pytest.mark.system
def test_an_evaluation_that_is_known_can_be_filmed_later_and_only_once(run: Path, written: dict) -> None:
    evaluate.run(tiny(env=ENV), run=run)
    filmed = evaluate.run(tiny(env=ENV, evaluate={"video": 1}), run=run)
    assert filmed.status == "done"
    again = evaluate.run(tiny(env=ENV, evaluate={"video": 1}), run=run)
    assert again.status == "skipped"
    assert again.outputs == filmed.outputs
    elsewhere = evaluate.run(tiny(env=ENV, evaluate={"video": 1}), run=run, videos=run / "other")
    assert [path.parent.name for path in elsewhere.outputs] == ["evaluations", "other"]


def test_no_more_videos_than_episodes(run: Path, written: dict) -> None:
    filmed = evaluate.run(tiny(env=ENV, evaluate={"video": 50, "episodes": 3}), run=run)
    assert len(filmed.outputs) == 1 + 3


def test_without_an_encoder_nothing_is_played(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_writer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputMissing, match="videos need av"):
        evaluate.run(tiny(env=ENV, evaluate={"video": 1}), run=run)
    assert not list((run / "evaluations").glob("*.json"))


@pytest.mark.system
def test_a_chain_goes_on_without_its_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: DarkRoom, actor: int) -> None:
        raise StageFailed("it cannot be drawn")

    monkeypatch.setattr(DarkRoom, "_scene", broken)
    heard: list[Event] = []
    stages = [{"stage": "collect"}, {"stage": "train"}, {"stage": "evaluate", "video": 1}]
    done = chain.run(tiny(env=ENV, stages=stages), run=tmp_path / "run", listener=heard.append)
    assert done.metrics["episodes"] == 6
    warnings = [event.text for event in heard if isinstance(event, Notice) and event.level == "warning"]
    assert "no videos: it cannot be drawn" in warnings


@pytest.mark.system
def test_an_episode_to_watch_is_one_of_the_evaluation(run: Path) -> None:
    """Of a greedy one: a sampled action also depends on who else draws."""
    judged = {"episodes": 4, "greedy": True}
    everything = evaluate.run(tiny(env=ENV, evaluate=judged), run=run).metrics["return_mean"]
    watched = [filming.watch(tiny(env=ENV, evaluate=judged), run=run, episode=number) for number in range(4)]
    assert np.mean([sum(each.film.rewards) for each in watched]) == pytest.approx(everything)
    assert all("@" in frame for each in watched for frame in each.film.frames)
    assert watched[0].film.values is not None
    assert watched[0].film.values.shape == (8,)
    assert len({each.film.task for each in watched}) > 1


def test_an_agent_without_critics_has_no_values(tmp_path: Path) -> None:
    settings = tiny(env=ENV, agent={"kind": "behaviour-cloning"})
    collect.run(settings, run=tmp_path / "run")
    train.run(settings, run=tmp_path / "run", lakes=[(tmp_path / "run/lake", 1.0)])
    assert filming.watch(settings, run=tmp_path / "run").film.values is None


@pytest.mark.system
def test_values_are_those_of_the_same_steps_in_a_lake(run: Path) -> None:
    """The evaluation's greedy episode, collected into a lake and evaluated there, has the film's values."""
    everywhere = {**ENV, "holdout": 0.0}  # so that a collector plays every task
    watched = filming.watch(tiny(env=everywhere, evaluate={"greedy": True}), run=run).film
    collecting = {"steps": 400, "greedy": True, "policy": str(run)}
    collect.run(tiny(env=everywhere, collect=collecting), run=run.parent / "again")
    lake, values = Lake(run.parent / "again"), Values(str(run))
    alike = next(each for each in reading.trajectories(lake) if each.info.task == watched.task)
    assert alike.columns["reward"][1:].tolist() == watched.rewards
    np.testing.assert_allclose(values(alike, lake.only_schema())["v"][:, -1], watched.values, atol=1e-5)
