"""Checkpoints: whole or absent, pruned but for the best, damage named."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch

from pipelines.config.policy_files import list_checkpoints
from pipelines.errors import InputMissing, IntegrityError, UsageError
from pipelines.learning import checkpoint as checkpoints


def save(directory: Path, update: int, keep: int = 10) -> Path:
    return checkpoints.save(
        directory,
        record={"update": update},
        weights={"w": torch.full((3,), float(update))},
        training_state={"generator": torch.get_rng_state()},
        keep=keep,
    )


def test_the_newest_is_the_latest_and_numbers_are_named(tmp_path: Path) -> None:
    for update in (5, 20, 100):
        save(tmp_path, update)
    assert list_checkpoints(tmp_path) == [5, 20, 100]
    assert checkpoints.load(tmp_path).update == 100
    assert (tmp_path / "latest").resolve().name == "000100"
    assert checkpoints.load(tmp_path, "20").weights["w"].tolist() == [20.0] * 3


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    save(tmp_path, 1)
    checkpoints.mark_best(tmp_path, 1)
    for update in (2, 3, 4):
        save(tmp_path, update, keep=2)
    assert list_checkpoints(tmp_path) == [1, 3, 4]
    assert checkpoints.load(tmp_path, "best").update == 1


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def refuse(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(checkpoints, "safetensors_bytes", refuse)
    with pytest.raises(RuntimeError):
        save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000001", "latest"]


def test_what_a_dead_writer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-000007-999999999").mkdir(parents=True)
    save(tmp_path, 8)
    assert not list(tmp_path.glob(".tmp-*"))
    assert list_checkpoints(tmp_path) == [8]


@pytest.mark.parametrize("name", ["weights.safetensors", "checkpoint.json"])
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1) / name
    path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(IntegrityError, match="000001"):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", "nul", '{"update": 1, "files": {}}', "[" * 10_000])
def test_a_record_of_something_else_is_damage(tmp_path: Path, text: str) -> None:
    (save(tmp_path, 1) / "checkpoint.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"checkpoint\.json"):
        checkpoints.load(tmp_path)


def test_another_checkpoint_s_record_is_damage(tmp_path: Path) -> None:
    other = save(tmp_path / "other", 2)
    shutil.copy(other / "checkpoint.json", save(tmp_path, 1))
    with pytest.raises(IntegrityError, match="not that of this checkpoint"):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize("name", ["weights.safetensors", "average.safetensors", "training.pt", "checkpoint.json"])
def test_any_flipped_bit_is_found_and_the_newest_intact_checkpoint_named(tmp_path: Path, name: str) -> None:
    for update in (1, 2, 3):
        save(tmp_path, update)
    (tmp_path / "000002" / "training.pt").write_bytes(b"damaged too")
    path = tmp_path / "000003" / name
    whole = path.read_bytes()
    for place in range(0, len(whole), max(len(whole) // 40, 1)):
        data = bytearray(whole)
        data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match=rf"000003.*{re.escape(name)}.* intact one is 1:"):
            checkpoints.load(tmp_path).training_state()
    path.unlink()
    if name != "checkpoint.json":
        with pytest.raises(IntegrityError, match=f"{re.escape(name)} is missing"):
            checkpoints.load(tmp_path).training_state()


def test_a_run_without_intact_checkpoints_is_reported(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "weights.safetensors").write_bytes(b"")
    with pytest.raises(IntegrityError, match="no checkpoint of the run is intact"):
        checkpoints.load(tmp_path)


def test_saving_the_same_update_again_never_leaves_less_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is replaced or pruned goes out of sight by a rename, however long its removal takes."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    seen: list[list[int]] = []

    def slow(path: Path, **_: object) -> None:
        seen.append(list_checkpoints(tmp_path))
        assert all(checkpoints.load(tmp_path, str(number)) for number in seen[-1])

    monkeypatch.setattr(checkpoints.shutil, "rmtree", slow)
    save(tmp_path, 2, keep=1)
    assert [] not in seen
    assert list_checkpoints(tmp_path) == [2]


def test_links_that_a_dead_writer_left_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name, age in ((".latest.00ff00ff", 3600), (".best.aabbccdd", 3600), (".latest.11111111", 0)):
        (tmp_path / name).symlink_to("000001")
        os.utime(tmp_path / name, (time.time() - age,) * 2, follow_symlinks=False)
    save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.glob(".*")) == [".latest.11111111"]


def test_damage_of_the_training_state_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / "training.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(IntegrityError, match="000001"):
        checkpoints.load(tmp_path).training_state()


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="no checkpoint in"):
        checkpoints.load(tmp_path)
    save(tmp_path, 1)
    with pytest.raises(InputMissing, match="there are: 1"):
        checkpoints.load(tmp_path, "2")
    with pytest.raises(InputMissing, match="best"):
        checkpoints.load(tmp_path, "best")
    with pytest.raises(UsageError):
        checkpoints.load(tmp_path, "newest")
