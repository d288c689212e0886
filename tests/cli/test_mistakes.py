"""Mistakes of many kinds: one line that says what and where, the right exit code, never a traceback or a wait."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from pipelines.config.settings import Settings
from tests.cli.conftest import Amago, Call, tiny
from tests.test_trust import reseal
from tests.tiers import some, trials

STEPS = ("--steps", 20, "--actors", 2, "-s", "collect.workers=0")


def refused(call: Call, code: int, *words: str) -> None:
    assert (call.code, "Traceback" in call.err) == (code, False), call.err
    assert any(line.startswith("error: ") for line in call.err.splitlines())
    assert all(word in call.err for word in words), call.err


def keys(document: dict, prefix: str = "") -> list[str]:
    return [
        name
        for key, value in document.items()
        for name in (keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"])
    ]


@pytest.mark.trials
@pytest.mark.parametrize("value", some(["nan", "-inf"], 0))
def test_no_setting_may_be_nan_or_infinite(amago: Amago, value: str) -> None:
    known = keys(Settings().model_dump(mode="json"))
    for key in [*known[:: 4 // trials(4, quick=1)], "env.size", "exploration.options.a"]:
        call = amago("collect", "--env", "gym:CartPole-v1", "--dry-run", "-s", f"{key}={value}")
        refused(call, 2)
        assert f"  {key}: " in call.err, call.err


TOMLS = {
    "links to itself": (lambda path: path.symlink_to(path.name), 3, "symbolic links"),
    "nested arrays": (lambda path: path.write_text("x = " + "[" * 5000 + "]" * 5000), 2, "nested"),
    "nested tables": (lambda path: path.write_text("x = " + "{x = " * 70 + "1" + "}" * 70), 2, "nested"),
    "dots": (lambda path: path.write_text(".".join("a" * 100_000) + " = 1"), 2, "more than 64 parts"),
    "dots in a table": (lambda path: path.write_text(f"[{'.'.join('a' * 100_000)}]"), 2, "more than 64 parts"),
    "large": (lambda path: path.write_bytes(b"#" * (50 << 20)), 3, "more than 4 MiB"),
    "pipe": (os.mkfifo, 3, "not a regular file"),
    "folder": (Path.mkdir, 3, "a directory"),
    "bytes": (lambda path: path.write_bytes(b"\xff\xfe"), 2, "not valid TOML"),
    "digits": (lambda path: path.write_text("x = " + "9" * 9000), 2, "not valid TOML"),
    "nan": (lambda path: path.write_text("train.learning_rate = nan"), 2, "train.learning_rate: input should be"),
}


@pytest.mark.system
@pytest.mark.parametrize("kind", TOMLS)
def test_a_bad_configuration_is_one_line(amago: Amago, tmp_path: Path, kind: str) -> None:
    make, code, words = TOMLS[kind]
    make(tmp_path / "a.toml")
    refused(amago("collect", "-c", "a.toml", "--env", "gym:CartPole-v1", "--dry-run"), code, "a.toml", words)
    assert amago("run", "a.toml", "--dry-run").code == code


@pytest.mark.parametrize(
    "assignment", ["x=" + "[" * 5000, ".".join("a" * 9000) + "=1", "a=" + "{a=" * 99 + "1" + "}" * 99]
)
def test_a_deep_assignment_is_one_line(amago: Amago, assignment: str) -> None:
    refused(amago("collect", "--env", "gym:CartPole-v1", "--dry-run", "-s", assignment), 2)


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("no observation space", 2, "its observation_space is none"),
        ("no action space", 2, "its action_space is none"),
        ("many actions", 2, "1099511627776"),
        ("many values", 2, "1099511627776"),
        ("empty observation", 2, "is 0, from 1"),
        ("empty action", 2, "is 0, from 1"),
        ("huge observation", 2, "200000000"),
        ("worst in constructor", 1, "Worst: it cannot be made"),
        ("worst in reset", 1, "Worst: it cannot begin"),
        ("worst in step", 1, "Worst: it breaks"),
        ("terminated", 1, "its terminated is nan"),
        ("truncated", 1, "its truncated is array"),
    ],
)
@pytest.mark.parametrize("workers", some([0, 2], 0))
def test_an_odd_environment_is_one_line(amago: Amago, fault: str, code: int, words: str, workers: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    own = ("--env", "tests.envs.odd:Odd", "-s", f"env.fault={fault}", "--lake", "lake", "--steps", 20, "--actors", 2)
    refused(amago("collect", *own, "-s", f"collect.workers={workers}", "-q"), code, words, "tests.envs.odd:Odd")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 1 << 19  # KiB: 200 M floats take more, libraries that are imported here take less


@pytest.mark.system
def test_an_environment_that_changes_the_directory_does_not_move_the_lake(amago: Amago, tmp_path: Path) -> None:
    own = ("--env", "tests.envs.odd:Odd", "-s", "env.fault=moves", "--steps", 20, "--actors", 1, "-q")
    assert amago("collect", *own, "--lake", "lake", "-s", "collect.workers=0").code == 0
    shutil.rmtree("elsewhere")
    assert amago("collect", *own, "--run", "runs/x", "-s", "collect.workers=0").code == 0
    assert Path.cwd() == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "lake", "runs"]
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["own.txt"]
    assert amago("lake", "info", "lake", "--output", "json").json["metrics"]["steps"] >= 20


def test_places_that_cannot_be_a_run_are_refused(amago: Amago, small: Path) -> None:
    for place, words in (("/", "root directory"), ("small/lake", "is a lake")):
        refused(amago("collect", "--env", "gym:CartPole-v1", "--run", place, "--steps", 20), 2, words)
        train = ("train", "--from-lake", "small", "--run", place, "--steps", 1, "--encoder", "feedforward", *tiny())
        refused(amago(*train), 2, words)
    assert not Path("/config.toml").exists()
    assert not Path("small/lake/config.toml").exists()


def test_a_lake_is_not_copied_into_itself(amago: Amago, small: Path) -> None:
    shutil.copytree("small/lake", "a")
    refused(amago("lake", "copy", "a", "a/sub"), 2, "one is inside the other")
    assert not Path("a/sub").exists()
    shutil.copytree("a", "b")
    Path("a").rename("b/inner")
    refused(amago("lake", "copy", "b/inner", "b"), 2)
    assert amago("lake", "copy", "small", "small/other").code == 0  # in the run's directory, beside its lake


FILES = (
    "lake/schemas/*.json",
    "lake/segments/*/*.arrow",
    "lake/index.duckdb",
    "lake/lake.json",
    "run.json",
    "config.toml",
)


@pytest.mark.system
@pytest.mark.parametrize("pattern", FILES)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(amago: Amago, small: Path, pattern: str) -> None:
    if "index" in pattern:
        assert amago("lake", "sql", small, "select count(*) from trajectories").code == 0
    path = next(small.glob(pattern))
    path.unlink()
    os.mkfifo(path)
    for command in (
        ("lake", "info", small),
        ("lake", "sql", small, "select sum(reward) from steps"),
        ("lake", "verify", small),
        ("evaluate", small, "--episodes", 1),
        ("train", "--from-lake", "small", "--steps", 4, "--encoder", "feedforward", *tiny()),
    ):
        call = amago(*command)
        assert call.code in (0, 1, 2, 3, 4), command
        assert "Traceback" not in call.err, command


def test_a_pipe_in_place_of_wide_columns_is_damage(amago: Amago) -> None:
    assert amago("collect", "--env", "tests.envs.frames:Frames", "--lake", "lake", *STEPS).code == 0
    path = next(Path("lake").glob("segments/*/*.blob.arrow"))
    path.unlink()
    os.mkfifo(path)
    call = amago("lake", "verify", "lake")
    refused(call, 4)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", json.dumps({"stages": {"train": []}})),
        ("run.json", json.dumps({"lakes": [3]})),
        ("run.json", json.dumps({"best": {"score": "high"}})),
        ("run.json", "[" * 100_000),
        ("checkpoints/000003/checkpoint.json", "{" * 100_000),
        ("checkpoints/000003/checkpoint.json", json.dumps({"update": [3], "files": {}, "checksum": ""})),
    ],
)
def test_a_record_of_other_types_is_named(amago: Amago, small: Path, name: str, text: str) -> None:
    (small / name).write_text(text)
    refused(amago("lake", "lineage", small), 4, str(small))
    train = ("train", "--from-lake", "small", "--steps", 4, "--encoder", "feedforward", *tiny())
    refused(amago(*train), 4, name.split("/")[-1])


@pytest.mark.parametrize(
    "text", ["[]", "3", "[" * 100_000, '{"env": [3]}', '{"policies": {"x": 3}}', '{"processes": "x"}', '{"run": []}']
)
def test_a_collector_s_record_of_other_types_harms_nobody(amago: Amago, small: Path, text: str) -> None:
    next(small.glob("lake/collectors/*.json")).write_text(text)
    for command in (
        ("lake", "lineage", small),
        ("lake", "info", small),
        ("lake", "sql", small, "select * from collectors"),
        ("lake", "copy", small, "copied"),
    ):
        done = amago(*command)
        assert (done.code, "Traceback" in done.err) == (0, False), done.err


class Forbidden:
    """A class that no training state contains."""


STATES = {"a list": [], "empty": {}, "another class": Forbidden(), "other fields": {"optimizer": []}}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_a_training_state_of_other_types_is_named(amago: Amago, small: Path, state: object) -> None:
    """Its author makes the checksums fit."""
    sink = io.BytesIO()
    torch.save(state, sink)
    path = small / "checkpoints" / "000003" / "checkpoint.json"
    (path.parent / "training.pt").write_bytes(sink.getvalue())
    reseal(path, {})
    train = ("train", "--from-lake", "small", "--steps", 4, "--encoder", "feedforward", *tiny())
    refused(amago(*train), 4, "000003")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["collect", "--env", "tmaze", "--run", ""], "--run"),
        (["run", "tmaze", "--run="], "--run"),
        (["report", ""], "argument 'RUN...'"),
    ],
)
def test_an_empty_place_is_not_the_current_directory(amago: Amago, words: list[str], what: str) -> None:
    refused(amago(*words), 2, f"error: {what} is empty")
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "runs/x"], "unexpected argument 'runs/x'; did you mean --from-lake runs/x?"),
        (["collect", "tmaze"], "unexpected argument 'tmaze'; did you mean --env tmaze?"),
        (["collect", "--set", "collect.actors", "4"], "unexpected argument '4'; see `amago collect --help`"),
        (["evaluate", "--run", "runs/x"], "no such option --run; give RUN|BUNDLE without --run"),
        (["collect", "--stpes", "3"], "no such option --stpes; did you mean --steps?"),
        (["collect", "--steps"], "error: option '--steps' needs a value"),
        (["report", "runs/x", "--to"], "error: option '--to' needs a value"),
        (
            ["run", "tmaze", "--dry-run", "-s", f"evaluate.seed={2**64}"],
            "evaluate.seed: input should be less than 2147483648",
        ),
        (["collcet"], "no such command 'collcet'; did you mean 'collect'?"),
        (["train", "--from-lake", "x", "--size", "huge"], "size: input should be 'tiny', 'small', 'base' or 'large'"),
    ],
)
def test_misplaced_word_is_answered_by_what_was_meant(amago: Amago, words: list[str], said: str) -> None:
    done = amago(*words)
    assert done.code == 2
    assert said in done.err


def test_missing_lake_is_reported_before_anything_starts(amago: Amago) -> None:
    done = amago("train", "--from-lake", "runs/none")
    assert done.code == 3
    assert done.err.startswith("error: no lake at 'runs/none'")


def test_more_ranks_than_the_host_has_memory_for_are_refused_before_any_starts(amago: Amago) -> None:
    refused(amago("run", "tmaze", "--profile", "smoke", "--ranks", 4096), 2, "train.ranks = 4,096: this host has")
    assert not list(Path().iterdir())


def test_a_format_that_there_is_not_is_said_of_a_bundle_too(amago: Amago) -> None:
    refused(amago("export", "zoo:tmaze", "--format", "nope"), 2, "there is no format 'nope'; did you mean 'npz'?")
