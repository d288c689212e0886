"""Segments rewritten as one: the same rows, names of what they replace, nothing damaged taken along."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from pipelines.lake.folders import is_rewritten, list_all
from pipelines.lake.footer import hex_uids, read_footer
from pipelines.lake.log import lease
from pipelines.lake.maintenance.compaction import RewriteResult, rewrite
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.reading import Reader
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Spaces
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.lake.factories import IMAGES, MIXED, SCHEMA, assert_same, columns, derive, fill


def merge(lake: Lake, parts: dict[str, np.ndarray], **options) -> RewriteResult | None:
    with lease(lake) as held:
        return rewrite(lake, parts, held, **options)


def whole(lake: Lake, ids: list[str]) -> dict[str, np.ndarray]:
    return {id: np.ones(len(read_footer(lake.storage, id).uids()), dtype=bool) for id in ids}


@pytest.mark.parametrize("schema", [SCHEMA, IMAGES, MIXED], ids=["plain", "wide", "mixed"])
def test_every_row_is_as_it_was_but_for_where_it_lies(lake: Lake, schema: Schema) -> None:
    written = fill(lake, [3, 40, 5, 1, 7], schema=schema, seal_every=2)
    ids = list_all(lake.storage)
    before = [row for id in ids for row in read_footer(lake.storage, id).trajectories.to_pylist()]
    done = merge(lake, whole(lake, ids))
    assert done is not None
    assert is_rewritten(done.id)
    footer = read_footer(lake.storage, done.id)
    after = footer.trajectories.to_pylist()
    rows = np.array([row["length"] + 1 for row in after])
    assert [row.pop("row0") for row in after] == (np.cumsum(rows) - rows).tolist()
    assert after == [{name: value for name, value in row.items() if name != "row0"} for row in before]
    assert [footer.part(id) for id in ids] == [(0, 2), (2, 2), (4, 1)]
    reader = Reader(lake)
    for uid, values in written.items():
        assert_same(dict(reader.read(uid).columns), values)
    assert not verify(lake).corrupt


def test_what_a_segment_replaced_is_named_again_with_what_is_left_of_it(lake: Lake) -> None:
    fill(lake, [3, 4, 5, 6, 7], seal_every=2)
    one, two, three = list_all(lake.storage)
    first = merge(lake, whole(lake, [one, two]))
    assert first is not None
    last = merge(lake, {first.id: np.array([True, False, False, True])} | whole(lake, [three]))
    assert last is not None
    footer = read_footer(lake.storage, last.id)
    assert {id: footer.part(id) for id in footer.replaces} == {
        one: (0, 1), two: (1, 1), first.id: (0, 2), three: (2, 1)
    }  # fmt: skip


@pytest.mark.parametrize("schema", [SCHEMA, IMAGES], ids=["plain", "wide"])
def test_a_damaged_segment_is_left_as_it_is(lake: Lake, schema: Schema) -> None:
    written = fill(lake, [30, 40, 50], schema=schema, seal_every=1)
    first, second, third = list_all(lake.storage)
    parts = whole(lake, [first, second, third])
    damage(lake, second, written[list(written)[1]], schema)
    told: list = []
    done = merge(lake, parts, listener=told.append)
    assert done is not None
    assert done.replaced == (first, third)
    assert len(told) == 1
    assert "left unchanged" in told[0].text
    assert merge(lake, {second: parts[second]}) is None
    assert len(verify(lake).corrupt) == 1


def test_a_damaged_trajectory_that_is_dropped_harms_nothing(lake: Lake) -> None:
    written = fill(lake, [30, 30])
    (id,) = list_all(lake.storage)
    damage(lake, id, written[next(iter(written))], SCHEMA)
    done = merge(lake, {id: np.array([False, True])})
    assert done is not None
    assert hex_uids(read_footer(lake.storage, done.id).uids()) == [list(written)[1]]
    verify(lake)
    assert Reader(lake).uids() == [list(written)[1]]


def damage(lake: Lake, id: str, values: dict[str, np.ndarray], schema: Schema) -> None:
    """Change a byte of a trajectory: of its observations, or in the middle of its pictures."""
    path = lake.path / "segments" / (f"{id}.blob.arrow" if schema is IMAGES else f"{id}.arrow")
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if schema is IMAGES else data.index(values["obs.state"].tobytes())] ^= 1
    path.write_bytes(data)


@pytest.mark.system
def test_wide_columns_pass_through_little_memory(lake: Lake) -> None:
    """50 MB of pictures that compress to nothing."""
    big = Schema(Spaces(observation={"obs": Box(shape=(128, 128, 3), dtype="uint8")}, action=Box(shape=(1,))))
    for seed in range(4):
        with lake.writer(big, seal_seconds=1e9) as writer:
            values = big.empty(256)
            values["obs"][:, 0, 0, 0] = seed
            writer.append(values, TrajectoryInfo())
    parts = whole(lake, list_all(lake.storage))
    tracemalloc.start()
    try:
        done = merge(lake, parts)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert done is not None
    assert peak < 20 << 20
    assert [Reader(lake).read(uid).columns["obs"][5, 0, 0, 0] for uid in Reader(lake).uids()] == [0, 1, 2, 3]


def test_overlays_go_on_naming_what_they_derived_from(lake: Lake) -> None:
    written = fill(lake, [5, 6], seal_every=1)
    rng, derived = np.random.default_rng(0), {}
    for base in written:
        reward = columns(rng, len(written[base]["reward"]) - 1)["reward"]
        derived[derive(lake, {base: {"reward": reward}})[0]] = {**written[base], "reward": reward}
    bases = [id for id in list_all(lake.storage) if not id.endswith(".ovl")]
    overlays = [id for id in list_all(lake.storage) if id.endswith(".ovl")]
    assert merge(lake, whole(lake, bases)) is not None
    done = merge(lake, whole(lake, overlays))
    assert done is not None
    assert done.id.endswith(".ovl")
    assert read_footer(lake.storage, done.id).trajectories["base_segment"].to_pylist() == bases
    reader = Reader(lake)
    for uid, values in {**written, **derived}.items():
        assert_same(dict(reader.read(uid).columns), values)
