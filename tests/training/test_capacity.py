"""Lakes that a host cannot keep at hand are reported once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.data.mixture import Mixture, Share
from pipelines.data.view import Selection, View
from pipelines.events import Event, Notice
from pipelines.lake import storage
from pipelines.lake.store import Lake
from pipelines.training.capacity import CapacityCheck, count_drawn_bytes
from tests.lake.factories import IMAGES, SCHEMA, columns, derive, fill


def mixture_of(lake: Lake, **options: object) -> Mixture:
    mixture = Mixture([(View(lake, SCHEMA.id, **options), Share())], length=8, seed=0)
    mixture.refresh(0)
    return mixture


def checked(mixture: Mixture, *, share: float = 1.0, times: int = 1) -> list[str]:
    events: list[Event] = []
    check = CapacityCheck(mixture, share=share, listener=events.append)
    for _ in range(times):
        check()
    return [event.text for event in events if isinstance(event, Notice)]


def size_of(lake: Lake) -> int:
    return sum(file.stat().st_size for file in Path(lake.path).glob("segments/*/*.arrow"))


def test_what_may_be_drawn_is_counted_with_its_bases_and_blobs(tmp_path: Path) -> None:
    for number, schema in enumerate((SCHEMA, IMAGES)):
        lake = Lake.create(tmp_path / str(number))
        written = fill(lake, [30, 40, 50], schema=schema, seal_every=1)
        changed = columns(np.random.default_rng(0), 9, schema)["reward"]
        derive(lake, {next(iter(written)): {"reward": changed}}, offset=0)
        view = View(lake, schema.id)
        view.refresh()
        assert count_drawn_bytes(view) == size_of(lake)
        view.set_weights(np.array([0.0, 0.0, 0.0, 1.0]))  # the overlay, and the file of its base
        others = sum(lake.storage.size(key) for key in lake.storage.keys("segments/") if key.startswith("segments/"))
        assert 0 < count_drawn_bytes(view) < others


def test_a_lake_that_outgrows_the_host_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake.create(tmp_path / "lake")
    fill(lake, [30] * 8, seal_every=1)
    total = size_of(lake)
    monkeypatch.setattr(storage, "find_memory", lambda: total)
    assert checked(mixture_of(lake)) == []
    monkeypatch.setattr(storage, "find_memory", lambda: total - 1)
    [text] = checked(mixture_of(lake), times=3)
    assert f"of lake '{lake.name}', but has" in text
    assert "read from the disk" in text
    assert checked(mixture_of(lake), share=0.5) == []
    none = Selection(where="false", evaluate=lambda uids: np.zeros(len(uids)))
    assert checked(mixture_of(lake, selection=none)) == []


def test_growth_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake.create(tmp_path / "lake")
    fill(lake, [30] * 8, seal_every=1)
    mixture, events = mixture_of(lake), []
    check = CapacityCheck(mixture, share=1.0, listener=events.append)
    room = size_of(lake) + 10
    monkeypatch.setattr(storage, "find_memory", lambda: room)
    check()
    assert events == []
    fill(lake, [30] * 8, seal_every=1, seed=1)
    mixture.refresh(1)
    check()
    check()
    assert len(events) == 1


def test_an_object_store_s_limit_is_the_cache_of_this_host(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Lake.create(f"s3://{bucket}/lake")
    monkeypatch.setenv("AMAGO_CACHE_BYTES", "10K")
    lake = Lake(f"s3://{bucket}/lake")
    fill(lake, [300] * 8, seal_every=1)
    [text] = checked(mixture_of(lake))
    assert "caches 0.01 MB" in text
    assert "raise AMAGO_CACHE_BYTES" in text
    assert "train.shard = 'host'" in text
    monkeypatch.setenv("AMAGO_CACHE_BYTES", "1G")
    assert checked(mixture_of(Lake(f"s3://{bucket}/lake"))) == []
