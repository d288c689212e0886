"""What a user sees of a lake that is damaged, foreign or newer: a line, the right exit code, the rest usable."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.lake import footer
from pipelines.lake.store import Lake
from pipelines.lake.wal import MAGIC
from tests.cli.conftest import Amago, Call, call, tiny
from tests.tiers import some

COUNT = "select count(*) as n from trajectories"
QUESTIONS: dict[str, tuple[Any, ...]] = {
    "info": ("lake", "info", "small"),
    "sql": ("lake", "sql", "small", COUNT),
    "steps": ("lake", "sql", "small", "select sum(reward) from steps"),
    "train": ("train", "--from-lake", "small", "--run", "new", "--steps", 1, "--encoder", "feedforward", *tiny()),
    "verify": ("lake", "verify", "small"),
}
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def _grown(_prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = shutil.copytree(_prepared, tmp_path_factory.mktemp("grown") / "small", symlinks=True)
    assert call("collect", "--env", "gym:CartPole-v1", "--run", run, "--steps", 800, "--actors", 4).code == 0
    assert call("lake", "sql", run, COUNT).code == 0
    return Path(run)


@pytest.fixture
def lake(_grown: Path, amago: Amago, tmp_path: Path) -> Path:
    """A lake of two segments, of the run `small`."""
    shutil.copytree(_grown, tmp_path / "small", symlinks=True)
    return Path("small") / "lake"


def segments(lake: Path) -> list[Path]:
    return sorted(lake.glob("segments/*/*.arrow"))


def schema(lake: Path) -> Path:
    return next(lake.glob("schemas/*.json"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def change_header(lake: Path, **fields: Any) -> None:
    path = lake / "lake.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def log_entry(lake: Path, text: bytes) -> None:
    (lake / "log").mkdir(exist_ok=True)
    (lake / "log" / f"{1:012d}.json").write_bytes(text)


def litter(lake: Path) -> None:
    for folder in [path for path in lake.glob("**") if path.is_dir()]:
        (folder / "notes.txt").write_text("x")
        (folder / "what.json").mkdir()
        (folder / "loop.json").symlink_to("loop.json")


def lose_folders(lake: Path) -> None:
    for name in ("wal", "tmp", "locks"):
        shutil.rmtree(lake / name)


def link_to_itself(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.symlink_to(path.name)


def said(call: Call, words: str) -> None:
    assert "Traceback" not in call.err
    assert words in call.err, call.err


@pytest.mark.system
@pytest.mark.parametrize(
    ("damage", "codes", "words"),
    some(
        [
            (lambda lake: cut(segments(lake)[0]), {"verify": 4}, "1 corrupt segment"),
            (lambda lake: flip(segments(lake)[1], 900), {"verify": 4}, "1 corrupt segment"),
            (lambda lake: flip(segments(lake)[0], -60), {"verify": 4}, "1 corrupt segment"),
            (
                lambda lake: (lake / "lake.json").write_bytes(b"\xff{"),
                dict.fromkeys(QUESTIONS, 4),
                "lake.json' is damaged",
            ),
            (lambda lake: change_header(lake, version=99), dict.fromkeys(QUESTIONS, 3), "upgrade amago"),
            (lambda lake: change_header(lake, required_features=["x"]), dict.fromkeys(QUESTIONS, 3), "features"),
            (lambda lake: change_header(lake, required_features=7), dict.fromkeys(QUESTIONS, 4), "damaged"),
            (lambda lake: cut(schema(lake)), {"info": 4, "steps": 4, "train": 4, "verify": 4}, "is damaged"),
            (lambda lake: log_entry(lake, b"\xff"), {"verify": 4}, "is damaged"),
            (lambda lake: log_entry(lake, b'{"time": 1, "reason": "", "entries": 3}'), {"verify": 4}, "is damaged"),
            (lambda lake: link_to_itself(lake / "log"), dict.fromkeys(QUESTIONS, 1), "symbolic links"),
            (lambda lake: (lake / "index.duckdb").write_bytes(b"no index" * 99), {}, ""),
            (lose_folders, {}, ""),
            (litter, {}, ""),
        ],
        *(0, 3, 7, 8, 11),
    ),
    ids=[
        "cut",
        "flipped",
        "flipped footer",
        "header",
        "newer",
        "feature",
        "features",
        "schema",
        "log entry",
        "log entry of wrong types",
        "log",
        "index",
        "empty folders lost",
        "foreign files",
    ],
)
def test_each_command_ends_as_it_should(
    amago: Amago, lake: Path, damage: Damage, codes: dict[str, int], words: str
) -> None:
    damage(lake)
    for name, command in QUESTIONS.items():
        call = amago(*command)
        assert call.code == codes.get(name, 0), f"{name}: {call.err}"
        said(call, words if name in codes else "")


def test_what_verify_sets_aside_is_not_drawn_and_the_rest_is(amago: Amago, lake: Path) -> None:
    before = amago(*QUESTIONS["sql"], "--output", "json").json[0]["n"]
    flip(segments(lake)[0], 900)
    (found,) = amago(*QUESTIONS["verify"], "--output", "json").json["metrics"]["corrupt"]
    after = amago(*QUESTIONS["sql"], "--output", "json").json[0]["n"]
    assert 0 < after < before
    assert found in str(segments(lake)[0])
    assert amago(*QUESTIONS["train"]).code == 0


@pytest.mark.system
def test_collecting_again_heals_a_damaged_schema(amago: Amago, lake: Path) -> None:
    schema(lake).write_text("{}")
    said(amago(*QUESTIONS["train"]), "collect into the lake")
    assert amago("collect", "--env", "gym:CartPole-v1", "--run", "small", "--steps", 820, "--actors", 4).code == 0
    assert all(amago(*command).code == 0 for command in QUESTIONS.values())


def test_other_spaces_are_refused_before_anything_is_written(amago: Amago, lake: Path) -> None:
    before = segments(lake)
    refused = amago("collect", "--env", "tmaze", "--lake", lake, "--steps", 10)
    assert refused.code == 3
    said(refused, "other spaces")
    assert segments(lake) == before


def newer_segment(lake: Path, monkeypatch: pytest.MonkeyPatch, amago: Amago) -> Path:
    before = segments(lake)
    with monkeypatch.context() as patch:
        patch.setattr(footer, "FORMAT", 99)
        again = ("collect", "--env", "gym:CartPole-v1", "--run", lake.parent, "--steps", 840, "--actors", 4)
        assert amago(*again).code == 0
    (new,) = set(segments(lake)) - set(before)
    return new


@pytest.mark.system
def test_a_newer_segment_is_named_and_left_as_it_is(amago: Amago, lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = newer_segment(lake, monkeypatch, amago)
    content = new.read_bytes()
    for name, command in QUESTIONS.items():
        call = amago(*command)
        assert call.code == (3 if name == "verify" else 0), f"{name}: {call.err}"
        said(call, "upgrade amago")
    assert new.read_bytes() == content
    assert not list(lake.glob("quarantine/*"))


def test_a_newer_schema_is_named_and_left_as_it_is(amago: Amago, lake: Path) -> None:
    data = json.loads(schema(lake).read_text()) | {"units": "metres"}
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    new = lake / "schemas" / f"{hashlib.sha256(canonical.encode()).hexdigest()[:16]}.json"
    new.write_text(json.dumps(data))
    refused = amago(*QUESTIONS["info"])
    assert refused.code == 3
    said(refused, "upgrade amago")
    assert amago(*QUESTIONS["sql"]).code == amago(*QUESTIONS["verify"]).code == 0
    assert json.loads(new.read_text()) == data


@pytest.mark.parametrize("content", [b"AMAGOWAL2\n\0what comes then", MAGIC.replace(b"1", b"7")], ids=["two", "seven"])
def test_a_newer_log_is_named_and_left_as_it_is(amago: Amago, lake: Path, content: bytes) -> None:
    log = lake / "wal" / "w.1.0-00000000.wal"
    log.write_bytes(content)
    for name in ("verify", "train"):
        call = amago(*QUESTIONS[name])
        assert call.code == 0
        said(call, "upgrade amago")
    assert log.read_bytes() == content


def test_an_unsalvaged_log_that_cannot_be_read_is_named(amago: Amago, lake: Path) -> None:
    (lake / "wal" / "w.1.0-00000000.wal").write_bytes(os.urandom(300))
    call = amago(*QUESTIONS["verify"])
    assert call.code == 0
    said(call, "not the log of a writer")
    assert Lake(lake).salvage() == 0
