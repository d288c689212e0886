"""Policies in a lake: what is published is what acts, and nothing else is taken for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as safetensors_bytes

from pipelines.errors import AmagoError, InputMissing, IntegrityError, UsageError
from pipelines.files.checksums import seal
from pipelines.lake.store import Lake
from pipelines.learning import published
from pipelines.learning.checkpoint import Checkpoint
from pipelines.learning.published import KEPT, PolicyWriter, find_newest, find_published_lake, folder_name, load


@pytest.fixture(params=["directory", "s3"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    place = tmp_path / "lake" if request.param == "directory" else f"s3://{request.getfixturevalue('bucket')}/a/lake"
    return Lake.create(place)


def checkpoint(update: int, *, value: float = 0.0) -> Checkpoint:
    weights = {"a": torch.full((3,), value or float(update)), "b": torch.zeros(2)}
    record = {"update": update, "agent": {}, "spaces": {}, "context_length": 8, "optimizer": "not for others"}
    return Checkpoint(path=Path("run"), record=record, weights=weights, average={"b": torch.ones(2)})


def policies(lake: Lake) -> list[str]:
    return sorted(lake.storage.names("policies/run-1"))


@pytest.mark.system
def test_what_is_published_is_what_acts(lake: Lake) -> None:
    assert find_newest(lake) is None
    writer = PolicyWriter(lake, "run-1")
    writer.write(checkpoint(200))
    found = find_newest(lake)
    assert found is not None
    assert (found.run, found.update) == ("run-1", 200)
    assert find_newest(lake, "run-1") == found
    assert find_newest(lake, "run-2") is None
    assert policies(lake) == ["000200.json", "000200.safetensors", "latest.json"]
    loaded = load(lake, found)
    assert loaded.update == 200
    assert set(loaded.record) == {"update", "agent", "spaces", "context_length", "run", "files"}
    torch.testing.assert_close(loaded.acting, {"a": torch.full((3,), 200.0), "b": torch.ones(2)})


def test_a_few_are_kept_in_the_order_of_publication(lake: Lake) -> None:
    writer = PolicyWriter(lake, "run-1")
    for update in (100, 200, 300, 400):
        writer.write(checkpoint(update))
    assert KEPT == 3
    assert policies(lake)[:6:2] == ["000200.json", "000300.json", "000400.json"]
    resumed = PolicyWriter(lake, "run-1")
    for update in (50, 100):  # of a fresh start
        resumed.write(checkpoint(update))
        found = find_newest(lake)
        assert found is not None
        assert load(lake, found).update == update
    assert [name for name in policies(lake) if name.endswith(".json")] == [
        "000050.json",
        "000100.json",
        "000400.json",
        "latest.json",
    ]


def test_the_same_update_published_again_is_read_anew(lake: Lake) -> None:
    writer = PolicyWriter(lake, "run-1")
    for value in (1.0, 2.0):
        writer.write(checkpoint(7, value=value))
        found = find_newest(lake)
        assert found is not None
        assert float(load(lake, found).acting["a"][0]) == value


def test_one_of_several_runs_must_be_named(lake: Lake) -> None:
    for run in ("run-1", "run-2"):
        PolicyWriter(lake, run).write(checkpoint(1))
    with pytest.raises(UsageError, match=r"2 runs publish policies in .*: run-1, run-2; name one: LAKE/RUN"):
        find_newest(lake)
    assert find_newest(lake, "run-2") is not None
    for name in ("../run-1", "", ".."):
        with pytest.raises(UsageError):
            find_newest(lake, name)


def test_two_that_publish_the_same_run_notice(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, other = PolicyWriter(lake, "run-1"), PolicyWriter(lake, "run-1")
    write = lake.storage.write

    def meanwhile(key: str, content: bytes) -> None:
        monkeypatch.undo()
        other.write(checkpoint(9))
        write(key, content)

    monkeypatch.setattr(lake.storage, "write", meanwhile)
    with pytest.raises(FileExistsError):
        writer.write(checkpoint(5))
    found = find_newest(lake)
    assert found is not None
    assert found.update == 9
    load(lake, found)


def test_a_place_is_split_into_lake_and_run(lake: Lake) -> None:
    place = lake.name
    assert find_published_lake(place) == (place, "")
    assert find_published_lake(f"{place}/run-1") == (place, "run-1")
    if place.startswith("s3"):
        assert find_published_lake(f"{place}/not/there") == (f"{place}/not/there", "")  # not there yet
    else:
        assert find_published_lake(str(Path(place).parent / "elsewhere")) is None


def test_a_name_becomes_one_of_a_folder() -> None:
    assert folder_name("runs/../ä b-12") == "runs-..-b-12"
    assert folder_name("...") == "run"
    assert all(published._RUN.fullmatch(folder_name(name)) for name in ("x" * 999, "-a", ".hidden", "a/b", "ü"))


DAMAGE: dict[str, Callable[[Lake], None]] = {
    "pointer cut": lambda lake: _change(lake, "latest.json", lambda content: content[:-5]),
    "pointer altered": lambda lake: _change(lake, "latest.json", lambda content: content.replace(b"200", b"300")),
    "pointer of another run": lambda lake: _change(
        lake, "latest.json", lambda _: seal({"update": 200, "run": "other"}, {"000200.json": b""})
    ),
    "pointer to elsewhere": lambda lake: _change(
        lake, "latest.json", lambda _: seal({"update": "../../x", "run": "run-1"}, {})
    ),
    "pointer too large": lambda lake: _change(lake, "latest.json", lambda content: content + b" " * (1 << 17)),
    "record altered": lambda lake: _change(lake, "000200.json", lambda content: content.replace(b"8", b"9")),
    "record gone": lambda lake: lake.storage.remove("policies/run-1/000200.json"),
    "record nested": lambda lake: _change(lake, "000200.json", lambda _: b"[" * 100_000),
    "weights cut": lambda lake: _change(lake, "000200.safetensors", lambda content: content[:-1]),
    "weights of something else": lambda lake: _change(
        lake, "000200.safetensors", lambda _: safetensors_bytes({"a": torch.zeros(3)})
    ),
    "weights gone": lambda lake: lake.storage.remove("policies/run-1/000200.safetensors"),
}


def _change(lake: Lake, name: str, change: Callable[[bytes], bytes]) -> None:
    key = f"policies/run-1/{name}"
    lake.storage.write(key, change(lake.storage.read(key)))


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_was_altered_is_refused(lake: Lake, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PolicyWriter(lake, "run-1").write(checkpoint(200))
    DAMAGE[damage](lake)
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "elsewhere"))
    there = Lake(lake.name)

    def act() -> None:
        found = find_newest(there)
        assert found is not None
        load(there, found)

    with pytest.raises((IntegrityError, InputMissing, OSError)) as caught:
        act()
    assert isinstance(caught.value, InputMissing) == damage.endswith("gone")
    assert "\n" not in str(caught.value)


def test_weights_that_are_too_large_are_not_fetched(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    PolicyWriter(lake, "run-1").write(checkpoint(200))
    monkeypatch.setattr(published, "_WEIGHTS_BYTES", 10)
    monkeypatch.setattr(lake.storage, "fetch", None)
    found = find_newest(lake)
    assert found is not None
    with pytest.raises(AmagoError, match="weights have more than"):
        load(lake, found)


def test_the_pointer_is_plain_json(lake: Lake) -> None:
    PolicyWriter(lake, "run-1").write(checkpoint(200))
    pointer = json.loads(lake.storage.read("policies/run-1/latest.json"))
    assert (pointer["update"], pointer["run"], list(pointer["files"])) == (200, "run-1", ["000200.json"])
