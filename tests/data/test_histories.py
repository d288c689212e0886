"""Windows over histories, against windows built by hand from the episodes that were written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.data.histories import HistoryContext
from pipelines.data.mixture import Mixture, Share
from pipelines.data.sampler import WindowSampler
from pipelines.data.strategy import Strategy
from pipelines.data.view import HISTORY, Selection, View
from pipelines.errors import InputMissing
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.schema import Schema
from pipelines.lake.store import Lake
from pipelines.lake.uids import raw_uids
from tests.lake.factories import IMAGES, MIXED, SCHEMA, derive
from tests.lake.histories import Written, fill_histories

LENGTHS = {"c/0/left": [3, 5, 2, 4, 1, 6], "c/1/right": [4, 4, 2], "": [6]}
EQUAL = {"c/0/left": [4] * 9, "c/1/right": [4] * 6 + [2], "": [6]}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def make_sampler(lake: Lake, length: int, context: HistoryContext | None = None, **more: Any) -> WindowSampler:
    strategy = more.pop("strategy", Strategy())
    view = View(lake, lake.only_schema().id, extra=(*strategy.extra, *HISTORY), selection=more.pop("selection", None))
    view.refresh()
    return WindowSampler(view, length=length, strategy=strategy, history=context or HistoryContext(), **more)


def join_whole(written: Written, name: str, order: list[int] | None = None) -> dict[str, np.ndarray]:
    """The rows of a history with merged joins: oracle of the gatherer, one row after the other. `ended/NAME`: what a
    window shows that ends there, the last observation of an episode instead of the first of the next."""
    episodes: dict[int, list[dict[str, np.ndarray]]] = {}
    for values, info in written.values():
        if info.history == name:
            assert info.history_index is not None
            episodes.setdefault(info.history_index, []).append(values)
    rows: list[dict[str, Any]] = []
    for index in order or sorted(episodes):
        whole = [
            {column: values[i] for column, values in part.items()}
            for number, part in enumerate(episodes[index])
            for i in range(number > 0, len(part["reward"]))
        ]
        for row in whole[:-1]:
            row["truncated"] = 0
        for row in whole:
            row |= {f"ended/{column}": row[column] for column in row if column.startswith("obs")}
        if rows:
            first = whole.pop(0)
            rows[-1] |= {column: first[column] for column in first if column.startswith("obs")}
            rows[-1]["reset"], rows[-1]["truncated"] = 1, 0
        rows += whole
    return {column: np.stack([row[column] for row in rows]) for column in rows[0]}


@pytest.mark.parametrize(("pieces", "packed"), [(0, False), (2, False), (0, True), (2, True)])
@pytest.mark.parametrize(
    ("length", "schema", "lengths"),
    [
        *((length, SCHEMA, LENGTHS) for length in (1, 4, 7, 40)),
        *((length, SCHEMA, EQUAL) for length in (9, 14)),
        *((4, IMAGES, LENGTHS), (7, MIXED, LENGTHS), (14, IMAGES, EQUAL)),
    ],
)
def test_windows_are_cuts_of_the_joined_history(
    lake: Lake, length: int, schema: Schema, lengths: dict[str, list[int]], pieces: int, packed: bool
) -> None:
    written = fill_histories(lake, lengths, schema=schema, pieces=pieces)
    if packed:
        compact(lake, grace_seconds=0.0)
    whole = {name: join_whole(written, name) for name in lengths if name}
    sampler = make_sampler(lake, length)
    batch = sampler.sample(400, np.random.default_rng(0))
    begins = Counter[tuple[str, int]]()
    for i, rows in enumerate(batch.lengths.tolist()):
        window = {name: values[i, :rows] for name, values in batch.columns.items()}
        assert not any(values[i, rows:].any() for values in batch.columns.values())
        ((name, at),) = find(window, whole)
        begins[name, at] += 1
        size = len(whole[name]["reward"]) - 1
        assert rows - 1 == min(length, size - at) or at == 0
        for column, values in window.items():
            if column in schema.spaces.observation:
                np.testing.assert_array_equal(values[:-1], whole[name][column][at : at + rows - 1])
                np.testing.assert_array_equal(values[-1], whole[name][f"ended/{column}"][at + rows - 1])
                continue
            skipped = int(batch.start[i] == 0)  # nothing led to the first row
            stop = rows - (column in ("reset", "truncated"))  # where a window ends, nothing follows
            np.testing.assert_array_equal(values[skipped:stop], whole[name][column][at + skipped : at + stop])
    assert {name for name, _ in begins} == set(whole)
    assert len(begins) >= (sum(len(each["reward"]) - 1 for each in whole.values())) * 0.9


def find(window: dict[str, np.ndarray], whole: dict[str, dict[str, np.ndarray]]) -> list[tuple[str, int]]:
    """Find the places in joined histories whose observations are those of a window."""
    rows, seen = len(window["reward"]), max(window, key=lambda column: column.startswith("obs") * window[column].nbytes)
    return [
        (name, at)
        for name, columns in whole.items()
        for at in range(len(columns["reward"]) - rows + 1)
        if np.array_equal(window[seen][:-1], columns[seen][at : at + rows - 1])
    ]


@pytest.mark.system
def test_every_step_is_shown_equally_often(lake: Lake) -> None:
    fill_histories(lake, {"a": [3, 2, 4], "b": [5]})
    sampler = make_sampler(lake, 4)
    table, shown = sampler.view.table, Counter[bytes]()
    for seed in range(60):
        batch = sampler.sample(500, np.random.default_rng(seed))
        for i, rows in enumerate(batch.lengths.tolist()):
            shown.update(batch.columns["obs.state"][i, t].tobytes() for t in range(rows - 1))
    counts = np.array(sorted(shown.values()))
    assert len(counts) == table["length"].sum()
    assert counts[-1] / counts[0] < 1.06


@pytest.mark.parametrize("stride", [2, 3])
def test_a_stride_shows_every_kth_episode(lake: Lake, stride: int) -> None:
    written = fill_histories(lake, {"a": [2] * 9})
    sampler = make_sampler(lake, 50, HistoryContext(stride=stride))
    batch = sampler.sample(200, np.random.default_rng(0))
    whole = {str(first): join_whole(written, "a", list(range(first, 9, stride))) for first in range(stride)}
    found = Counter[str]()
    for i, rows in enumerate(batch.lengths.tolist()):
        (place,) = find({name: values[i, :rows] for name, values in batch.columns.items()}, whole)
        found[place[0]] += 1
    assert set(found) == set(whole)


def test_order_by_return_is_ascending(lake: Lake) -> None:
    written = fill_histories(lake, {"a": [2, 3, 4, 2, 5, 3]})
    returns = [float(values["reward"][1:].sum()) for values, _ in written.values()]
    whole = {"a": join_whole(written, "a", np.argsort(returns).tolist())}
    batch = make_sampler(lake, 9, HistoryContext(order="return")).sample(100, np.random.default_rng(0))
    for i, rows in enumerate(batch.lengths.tolist()):
        assert len(find({name: values[i, :rows] for name, values in batch.columns.items()}, whole)) == 1


def test_shuffled_windows_are_full_and_begin_with_episodes(lake: Lake) -> None:
    written = fill_histories(lake, {"a": [2, 3, 4], "b": [5, 1]})
    batch = make_sampler(lake, 12, HistoryContext(order="shuffle")).sample(300, np.random.default_rng(0))
    firsts = {values["obs.state"][0].tobytes(): info.history for values, info in written.values()}
    assert (batch.lengths == 13).all()
    pairs = set()
    for i in range(300):
        begins = [0, *np.flatnonzero(batch.columns["reset"][i])]
        seen = [firsts.get(batch.columns["obs.state"][i, t].tobytes()) for t in begins if t < 12]
        assert None not in seen
        assert len(set(seen)) == 1
        pairs.add((batch.columns["obs.state"][i, 0].tobytes(), batch.columns["obs.state"][i, begins[1]].tobytes()))
    assert len(pairs) == 3 * 3 + 2 * 2


def test_truncated_episodes_are_marked_where_another_follows(lake: Lake) -> None:
    written = fill_histories(lake, {"a": [2, 3, 4, 2, 3]}, truncated=0.5)
    whole = join_whole(written, "a")
    batch = make_sampler(lake, 6).sample(200, np.random.default_rng(0))
    assert batch.cut_off is not None
    assert batch.cut_off.any()
    for i, rows in enumerate(batch.lengths.tolist()):
        window = {name: values[i, :rows] for name, values in batch.columns.items()}
        joins = (window["reset"] == 1) & (window["terminated"] == 0)
        np.testing.assert_array_equal(batch.cut_off[i, : rows - 1], joins[1:])
        assert not batch.cut_off[i, rows - 1 :].any()
    assert whole["reset"].sum() == 4


def test_selected_versions_take_the_place_of_their_originals(lake: Lake) -> None:
    written = fill_histories(lake, {"a": [2, 3, 4]})
    derive(lake, {uid: {"reward": values["reward"] + 10} for uid, (values, _) in written.items()})
    batch = make_sampler(lake, 5).sample(50, np.random.default_rng(0))
    for i, rows in enumerate(batch.lengths.tolist()):
        first = int(batch.start[i] == 0)
        assert (batch.columns["reward"][i, first:rows] > 5).all()


def test_with_the_horizon_of_the_history_ends_of_episodes_are_resets(lake: Lake) -> None:
    """Nothing else of the windows changes."""
    fill_histories(lake, LENGTHS)
    near, far = (make_sampler(lake, 9, HistoryContext(horizon=each)) for each in ("episode", "history"))
    for seed in range(5):
        one, other = (sampler.sample(100, np.random.default_rng(seed)) for sampler in (near, far))
        assert other.cut_off is None
        joined = one.columns["reset"] != 0
        assert (one.columns["terminated"][joined] != 0).any() or one.cut_off is not None
        for name, values in one.columns.items():
            expected = np.where(joined, 0, values) if name == "terminated" else values
            np.testing.assert_array_equal(other.columns[name], expected)


def test_a_selection_leaves_episodes_out(lake: Lake) -> None:
    written = fill_histories(lake, {"a": [2, 3, 4, 5]})
    kept = [values for values, info in written.values() if info.history_index in (0, 2)]
    uids = raw_uids([uid for uid, (_, info) in written.items() if info.history_index in (0, 2)])
    selection = Selection(where="x", evaluate=lambda given: np.isin(given, uids).astype(float))
    batch = make_sampler(lake, 50, selection=selection).sample(50, np.random.default_rng(0))
    assert batch.lengths.max() == sum(len(values["reward"]) - 1 for values in kept) + 1


def test_a_lake_without_histories_has_nothing_to_draw(lake: Lake) -> None:
    fill_histories(lake, {"": [3, 4]})
    with pytest.raises(InputMissing, match="no trajectories") as caught:
        make_sampler(lake, 4).sample(3, np.random.default_rng(0))
    assert "amago collect --tasks N" in str(caught.value.hint)


def test_warm_up_and_priorities_apply_to_histories(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    fill_histories(lake, {"a": [3, 4, 5]})
    sampler = make_sampler(lake, 4, strategy=Strategy(per_alpha=1.0), burn_in=2)
    batch = sampler.sample(30, np.random.default_rng(0))
    assert batch.warm_up is not None
    assert batch.trajectory is not None
    assert batch.importance is not None
    np.testing.assert_array_equal(batch.warm_up, np.where(batch.start == 0, 0, 2))
    sampler.prioritise(np.arange(3), np.array([0.0, 1.0, 0.0]))
    drawn = sampler.sample(200, np.random.default_rng(1)).trajectory
    assert drawn is not None
    assert (drawn == 1).mean() > 0.99


def test_lakes_are_mixed_of_which_one_has_truncated_episodes(tmp_path: Path) -> None:
    views = []
    for number, truncated in enumerate((0.0, 1.0)):
        lake = Lake.create(tmp_path / str(number))
        fill_histories(lake, {"a": [2, 3, 4]}, seed=number, truncated=truncated)
        views.append((View(lake, SCHEMA.id, extra=HISTORY), Share()))
    mixture = Mixture(views, length=5, seed=0, history=HistoryContext())
    mixture.refresh(0)
    batch = mixture.sample(64, 1)
    assert batch.cut_off is not None
    assert batch.lake is not None
    joins = (batch.columns["reset"] == 1) & (batch.lake == 1)[:, None]
    np.testing.assert_array_equal(batch.cut_off, joins[:, 1:])
    assert joins.any()


@pytest.mark.parametrize("order", ["time", "return", "shuffle"])
def test_a_restored_mixture_draws_the_same_windows_after_compaction(tmp_path: Path, order: Any) -> None:
    lake = Lake.create(tmp_path / "lake")
    fill_histories(lake, LENGTHS, truncated=0.3)

    def make() -> Mixture:
        view = View(lake, SCHEMA.id, extra=HISTORY)
        return Mixture([(view, Share())], length=6, seed=0, history=HistoryContext(order=order, stride=2))

    first = make()
    first.refresh(0)
    before = first.sample(40, 3)
    compact(lake, grace_seconds=0.0)
    second = make()
    second.restore(first.snapshots())
    second.refresh(0)
    after = second.sample(40, 3)
    np.testing.assert_array_equal(before.lengths, after.lengths)
    for name, values in before.columns.items():
        np.testing.assert_array_equal(values, after.columns[name])
