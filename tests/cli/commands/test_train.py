from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipelines.config.run_directory import RunDirectory
from tests.cli.conftest import Amago, tiny


def test_updates_and_their_fields(amago: Amago, small: Path) -> None:
    arguments = ["train", "--from-lake", small, "--run", "mine", "--steps", 2, "--output", "json"]
    done = amago(*arguments, "--encoder", "feedforward", *tiny())
    assert done.code == 0, done.err
    assert done.json["run"] == "mine"
    assert done.json["metrics"].keys() >= {"updates", "loss", "updates_per_second", "steps_seen"}
    assert done.json["metrics"]["updates"] == 2


@pytest.mark.system
def test_a_lake_of_a_run_trains_that_run_and_repeating_it_resumes(amago: Amago, small: Path) -> None:
    assert amago("train", "--from-lake", small, "--steps", 3, "--output", "json").json["status"] == "skipped"
    more = amago("train", "--from-lake", small, "--steps", 4, "--output", "json").json
    assert (more["status"], more["run"], more["metrics"]["updates"]) == ("done", "small", 4)


def test_a_bare_lake_trains_into_runs_train(amago: Amago, small: Path) -> None:
    shown = amago("train", "--from-lake", small / "lake", "--dry-run", "--output", "json")
    assert shown.json["run"] == "runs/train"
    assert not Path("runs").exists()


def test_another_encoder_drops_the_settings_of_the_old_one(amago: Amago, small: Path) -> None:
    shown = amago("train", "--from-lake", small, "--run", "b", "--encoder", "gru", "--dry-run", "--output", "json")
    assert shown.code == 0, shown.err
    assert shown.json["settings"]["agent"]["sequence"]["kind"] == "gru"
    assert shown.json["settings"]["agent"]["actor"]["hidden"] == [8]


@pytest.mark.system
@pytest.mark.parametrize("agent", ["multi-task", "behaviour-cloning"])
def test_another_agent_learns_from_the_same_lake_acts_and_is_exported(amago: Amago, small: Path, agent: str) -> None:
    done = amago("train", "--from-lake", small, "--run", "other", "--agent", agent, *tiny(), "--steps", 2)
    assert done.code == 0, done.err
    assert amago("train", "--from-lake", small, "--run", "other", "--agent", agent, *tiny(), "--steps", 3).code == 0
    judged = amago("evaluate", "other", "--episodes", 4, "--output", "json")
    assert judged.code == 0, judged.err
    assert amago("export", "other").code == 0
    refused = amago("train", "--from-lake", small, "--run", "other", "--agent", "actor-critic", *tiny(), "--steps", 4)
    assert refused.code == 2
    assert "agent.kind" in refused.err
    unknown = amago("train", "--from-lake", small, "--run", "third", "--agent", "cloning")
    assert unknown.code == 2


def test_a_changed_configuration_is_refused_with_a_diff(amago: Amago, small: Path) -> None:
    refused = amago("train", "--from-lake", small, "--set", "train.batch_size=5")
    assert refused.code == 2
    assert "train.batch_size: 4 -> 5" in refused.err


@pytest.mark.system
def test_lakes_are_mixed_and_another_mixture_is_refused(amago: Amago, small: Path) -> None:
    shutil.copytree(small / "lake", "b")
    header = json.loads(Path("b/lake.json").read_text())
    Path("b/lake.json").write_text(json.dumps({**header, "id": "0" * 32}))
    arguments = ["train", "--run", "mixed", "--encoder", "feedforward", *tiny("train.anneal_steps=5"), "--steps", 2]
    done = amago(*arguments, "--from-lake", "small:0.8..0.2", "--from-lake", "b:0.2", "--output", "json")
    assert (done.code, done.json["run"], done.json["lake"]) == (0, "mixed", "small/lake, b"), done.err
    again = amago(*arguments, "--from-lake", "small:0.8..0.2", "--from-lake", "b:0.2", "--output", "json")
    assert again.json["status"] == "skipped"
    refused = amago(*arguments, "--from-lake", "small:0.8..0.2", "--from-lake", "b:0.3")
    assert refused.code == 2
    assert "b:0.2: no longer given" in refused.err
    assert "b:0.3: not given before" in refused.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "no lake given"),
        (["--from-lake", "nowhere"], 3, "no lake at 'nowhere'"),
        (["--from-lake", "small:0"], 2, "add up to 0"),
        (["--from-lake", "small:1..0"], 2, "train.anneal_steps"),
        (["--from-lake", "small", "--from-lake", "small/lake"], 2, "named twice"),
        (["--from-lake", "small", "--from-lake", "nowhere:0.5"], 3, "no lake at 'nowhere'"),
        (["--from-lake", "small", "--run", "b", "--where", "lenght > 3"], 2, "lenght"),
        (["--from-lake", "small", "--run", "b", "--where", "length > 1e9"], 3, "no trajectories to draw from"),
        (["--from-lake", "small", "--run", "b", "--weight", "-length"], 2, "weight"),
        (["--from-lake", "small", "--where", "success"], 2, "train.where: '' -> 'success'"),
        (["--from-lake", "small", "--steps", "0"], 2, "train.steps"),
        (["--from-lake", "small", "--encoder", "grue"], 2, "agent.sequence"),
        (["--from-lake", "small", "--set", "train.context_lenght=4"], 2, "did you mean 'train.context_length'"),
        (["--from-lake", "small", "--steps", "4", "--set", "train.steps=5"], 2, "given twice"),
        (["--like", "small@2", "--run", "b"], 3, "has not kept checkpoint 2"),
        (["--like", "nothing", "--run", "b"], 3, "no run at 'nothing'"),
        (["--like", "small", "--run", "b", "--where", "success"], 2, "--like and --where exclude each other"),
        (["--like", "small", "--run", "b", "--follow"], 2, "like is a fixed set of trajectories"),
    ],
)
def test_mistakes_are_named_without_a_traceback(
    amago: Amago, small: Path, arguments: list[str], code: int, words: str
) -> None:
    failed = amago("train", *arguments)
    assert failed.code == code, failed.err
    assert words in failed.err
    assert "Traceback" not in failed.err


def test_a_truncated_segment_is_no_traceback(amago: Amago, small: Path) -> None:
    for segment in (small / "lake" / "segments").rglob("*.arrow"):
        segment.write_bytes(segment.read_bytes()[: segment.stat().st_size // 2])
    failed = amago("train", "--from-lake", small, "--run", "b", "--steps", 2, "--encoder", "feedforward", *tiny())
    assert failed.code in (3, 4)
    assert "Traceback" not in failed.err


def test_a_run_that_another_process_holds_is_exit_75_and_names_it(amago: Amago, small: Path) -> None:
    with RunDirectory(small).lock("train"):
        failed = amago("train", "--from-lake", small, "--steps", 9)
    assert failed.code == 75
    assert "pid" in failed.err


def test_fresh_starts_anew(amago: Amago, small: Path) -> None:
    arguments = ("train", "--from-lake", small, "--steps", 2, "--set", "train.batch_size=5", "--output", "json")
    assert amago(*arguments).code == 2
    done = amago(*arguments, "--fresh")
    assert (done.code, done.json["metrics"]["updates"]) == (0, 2)


def test_what_is_asked_for_by_sql_is_recorded_and_repeated(amago: Amago, small: Path) -> None:
    arguments = ("train", "--from-lake", small, "--run", "b", "--encoder", "feedforward", *tiny(), "--steps", 2)
    sql = ("--where", "length > 3", "--weight", "1.0 / length")
    done = amago(*arguments, *sql, "--output", "json")
    assert done.code == 0, done.err
    shown = amago(*arguments, "--dry-run", "--output", "json").json["settings"]["train"]
    assert (shown["where"], shown["weight"]) == ("length > 3", "1.0 / length")
    assert amago(*arguments, *sql, "--output", "json").json["status"] == "skipped"


def test_following_can_be_switched_on_for_a_run_that_goes_on(amago: Amago, small: Path) -> None:
    more = amago("train", "--from-lake", small, "--steps", 4, "--follow", "--output", "json")
    assert (more.code, more.json["metrics"]["updates"]) == (0, 4), more.err


@pytest.mark.system
def test_the_lakes_of_the_settings_serve_where_none_is_named(amago: Amago, small: Path) -> None:
    lakes = 'train.lakes=["{run}/lake:0.25", "small:0.75"]'
    assert amago("train", "--run", "none").code == 2
    shutil.copytree(small / "lake", "mine/lake")
    Path("mine/lake/lake.json").write_text((small / "lake/lake.json").read_text().replace('"id": "', '"id": "0'))
    done = amago("train", "--run", "mine", "--steps", 2, "--encoder", "feedforward", *tiny(lakes))
    assert done.code == 0, done.err
    drawn = RunDirectory("mine").load_record()["lakes"]
    assert [(Path(lake["lake"]).parent.name, lake["weight"]) for lake in drawn] == [("mine", 0.25), ("small", 0.75)]
    more = ("--steps", 1, "--encoder", "feedforward", *tiny())
    assert amago("train", "--run", "other", "--from-lake", small, *more, "--set", lakes).code == 2
    Path("mixture.toml").write_text(lakes)
    named = amago("train", "--run", "other", "--from-lake", small, *more, "--config", "mixture.toml")
    assert named.code == 0, named.err
    assert [lake["weight"] for lake in RunDirectory("other").load_record()["lakes"]] == [1.0]


@pytest.mark.system
def test_adding_updates_trains_as_many_more_each_time(amago: Amago, small: Path) -> None:
    words = ("train", "--from-lake", small, "--output", "json", "-q")
    for expected in (5, 7):
        done = amago(*words, "--add", 2)
        assert done.code == 0, done.err
        assert (done.json["metrics"]["updates"], done.json["status"]) == (expected, "done")
    assert RunDirectory(small).load_document()["train"]["steps"] == 7
    assert "would train 2 updates more" in amago("train", "--from-lake", small, "--add", 2, "--dry-run").out
    both = amago(*words, "--add", 2, "--steps", 9)
    assert (both.code, "exclude each other" in both.err) == (2, True)
    assert amago(*words, "--add", 0).code == 2


@pytest.mark.system
def test_a_run_that_was_copied_with_its_links_followed_goes_on(amago: Amago, small: Path) -> None:
    words = ("--episodes", 1, "--set", "evaluate.mark_best=true", "-q")
    assert amago("evaluate", small, *words).code == 0
    copied = Path(shutil.copytree(small, "copied"))  # without symlinks=True it follows them
    folders = [copied / "checkpoints" / name for name in ("latest", "best")]
    assert all(folder.is_dir() and not folder.is_symlink() for folder in folders)
    assert amago("evaluate", copied, "--checkpoint", "best", "--episodes", 1, "-q").code == 0
    keep = ("--set", "train.keep_checkpoints=1", "--set", "train.checkpoint_every=1")
    done = amago("train", "--from-lake", copied, "--steps", 6, *keep, "-q")
    assert done.code == 0, done.err
    names = sorted(path.name for path in (copied / "checkpoints").iterdir() if path.name != ".lock")
    assert names == ["000003", "000006", "best", "latest"], "the best one is kept"
    assert (copied / "checkpoints/latest").readlink() == Path("000006")
    assert amago("evaluate", copied, *words, "--set", "evaluate.best_by=episodes").code == 0
    assert (copied / "checkpoints/best").readlink() == Path("000006")


@pytest.mark.system
def test_a_run_is_trained_on_what_a_checkpoint_was_trained_on(amago: Amago, small: Path) -> None:
    assert amago("train", "--from-lake", "small", "--run", "a", "--steps", 1).code == 0
    assert amago("collect", "--run", "small", "--add", 100, "-q").code == 0
    done = amago("train", "--like", "a@1", "--run", "b", "--steps", 2, "--output", "json")
    assert (done.code, done.json["metrics"]["updates"]) == (0, 2), done.err
    listed = [amago("lake", "lineage", run, "--trajectories").out for run in ("a", "b")]
    assert listed[0] == listed[1]
    assert amago("train", "--run", "b", "--steps", 3, "--output", "json").json["metrics"]["updates"] == 3
    assert ",a-" in amago("runs", "b", "--output", "csv").out
    assert "trained on what a-" in amago("lake", "lineage", "b").out
    assert amago("lake", "expire", "small", "--where", "length < 20").code == 0
    refused = amago("train", "--like", "a@1", "--run", "c", "--steps", 2)
    assert refused.code == 3
    assert "no longer has" in refused.err
    assert not (Path("c") / "config.toml").exists()
