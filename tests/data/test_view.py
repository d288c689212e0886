import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from pipelines.data.view import PRIORITY, ROW, Selection, View, base_rows, bases, first_steps
from pipelines.errors import InputMissing, UsageError
from pipelines.events import Listener, Notice, Waiting
from pipelines.lake.footer import hex_uids
from pipelines.lake.maintenance.compaction import CompactionRules, compact
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.sql.sandbox import LimitReached
from pipelines.lake.store import Lake
from tests.lake.factories import IMAGES, INFO, SCHEMA, derive, fill, live_ids, segment_files


@pytest.fixture
def lake(tmp_path) -> Lake:
    return Lake.create(tmp_path / "lake")


def test_a_view_counts_what_it_holds(lake: Lake) -> None:
    fill(lake, [5, 6, 7], seal_every=2)
    fill(lake, [8], schema=IMAGES)
    view = View(lake, SCHEMA.id)
    assert (view.refresh(), view.num_trajectories, view.num_steps) == (3, 3, 18)
    assert view.table["weight"].tolist() == [1, 1, 1]
    fill(lake, [100] * 100)
    assert (view.refresh(), view.refresh()) == (100, 0)
    assert view.num_steps == 18 + 100 * 100
    assert View(lake, IMAGES.id).refresh() == 1
    assert ROW.itemsize == view.table.itemsize == 16


def test_the_fields_of_overlays_come_with_the_first_one(lake: Lake) -> None:
    """By hand: the overlay derives from the second trajectory, whose rows begin after the four of the first."""
    _, base = fill(lake, [3, 4])
    view = View(lake, SCHEMA.id, extra=PRIORITY)
    view.refresh()
    view.set_weights(np.array([2.0, 3.0]))
    view.table["priority"] = [0.5, 0.25]
    assert view.table.itemsize == ROW.itemsize + 5
    assert (bases(view.table).tolist(), base_rows(view.table).tolist()) == ([0, 0], [0, 4])
    derive(lake, {base: {"reward": np.ones(5, dtype=np.float32)}})
    view.refresh()
    table = view.table
    assert table["segment"].tolist() == [0, 0, 1]
    assert bases(table).tolist() == [0, 0, 0]
    assert (table["row0"].tolist(), base_rows(table).tolist()) == ([0, 4, 0], [0, 4, 4])
    assert (table["weight"].tolist(), table["priority"].tolist()) == ([2, 3, 1], [0.5, 0.25, 0])
    assert (view.num_steps, view.collected_steps) == (3 + 4 + 4, 3 + 4)


def test_rows_beyond_32_bits_widen_the_table(lake: Lake) -> None:
    """A file of so many rows is too large for a test: what the live set says of it is made up."""
    fill(lake, [3, 4])
    view = View(lake, SCHEMA.id)
    view.refresh()
    assert view.table["row0"].dtype == np.uint32
    fill(lake, [5, 6])
    view.live.refresh()
    known = view.live.segments[1]
    view.live.segments[1] = replace(known, row0=known.row0.astype(np.int64) + (1 << 32))
    view.refresh()
    assert view.table["row0"].tolist() == [0, 4, 1 << 32, (1 << 32) + 6]
    assert view.table["length"].tolist() == [3, 4, 5, 6]


def test_the_time_of_a_piece_is_a_field_once_there_are_pieces(lake: Lake) -> None:
    fill(lake, [3, 4])
    view = View(lake, SCHEMA.id)
    view.refresh()
    assert first_steps(view.table).tolist() == [0, 0]
    with lake.writer(SCHEMA) as writer:
        for chunk, begin in enumerate((0, 2)):
            info = replace(INFO, episode="e", chunk=chunk, first_step=begin, continues=not chunk)
            writer.append(SCHEMA.empty(3), info)
    view.refresh()
    assert view.table.itemsize == ROW.itemsize + 4
    assert first_steps(view.table).tolist() == [0, 0, 0, 2]


def test_what_is_not_selected_weighs_nothing_and_the_selection_holds_for_what_comes_later(lake: Lake) -> None:
    written = fill(lake, [5, 6, 7, 8], seal_every=2)
    chosen = dict(zip(list(written)[1:3], (2.0, 0.5), strict=True))
    asked: list[int] = []

    def evaluate(uids: np.ndarray) -> np.ndarray:
        asked.append(len(uids))
        return np.array([chosen.get(uid, 0.0) for uid in hex_uids(uids)])

    view = View(lake, SCHEMA.id, selection=Selection(where="w", evaluate=evaluate))
    assert view.refresh() == 4
    assert view.table["weight"].tolist() == [0, 2, 0.5, 0]
    view.refresh()
    assert asked == [4]  # nothing changed
    fill(lake, [9])
    assert view.refresh() == 1
    assert view.table["weight"].tolist() == [0, 2, 0.5, 0, 0]
    assert asked == [4, 5]
    assert view.snapshot()["where"] == "w"
    again = View(lake, SCHEMA.id, selection=view.selection)
    again.restore(view.snapshot())
    np.testing.assert_array_equal(again.table, view.table)


def test_steps_that_expire_were_collected_all_the_same_and_overlays_collect_none(lake: Lake) -> None:
    written = list(fill(lake, [5, 6, 7], seal_every=1))
    derive(lake, {written[2]: {"reward": np.ones(8, dtype=np.float32)}})
    view = View(lake, SCHEMA.id)
    for max_steps, grace in ((18, 60), (13, 60), (7, 60), (7, 0)):  # the last one sweeps, and restarts the log
        expire(lake, RetentionLimits(max_steps=max_steps), grace_seconds=grace)
        view.refresh()
        again = View(lake, SCHEMA.id)
        again.refresh()
        assert (view.collected_steps, again.collected_steps) == (18, 18)
    assert view.num_trajectories == 2  # one and its overlay


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf, 1e39])
def test_a_weight_that_is_none_is_refused(lake: Lake, weight: float) -> None:
    fill(lake, [5])
    view = View(lake, SCHEMA.id, selection=Selection(evaluate=lambda uids: np.full(len(uids), weight)))
    with pytest.raises(UsageError, match="weight"):
        view.refresh()


def test_a_snapshot_of_another_lake_is_refused(lake: Lake, tmp_path) -> None:
    fill(lake, [5])
    view = View(lake, SCHEMA.id)
    view.refresh()
    other = Lake.create(tmp_path / "other")
    fill(other, [5])
    with pytest.raises(InputMissing, match="not the one"):
        View(other, SCHEMA.id).restore(view.snapshot())


def test_a_snapshot_whose_segments_are_gone_is_restored_with_a_notice(lake: Lake) -> None:
    fill(lake, [5, 6], seal_every=1)
    view = View(lake, SCHEMA.id)
    view.refresh()
    segment_files(lake)[0].unlink()
    told: list = []
    again = View(lake, SCHEMA.id, listener=told.append)
    again.restore(view.snapshot())
    assert again.num_trajectories == 1
    assert "will not be bit-identical" in told[-1].text


def test_an_unknown_schema_is_refused(lake: Lake) -> None:
    with pytest.raises(InputMissing, match="no schema"):
        View(lake, "0" * 16)


def test_only_new_trajectories_are_given_to_a_selection_by_row(lake: Lake) -> None:
    fill(lake, [5, 6], seal_every=1)
    whole: list[int] = []
    new: list[list[int]] = []

    def evaluate(uids: np.ndarray) -> np.ndarray:
        whole.append(len(uids))
        return np.ones(len(uids))

    def extend(tables: Sequence[pa.Table]) -> np.ndarray:
        lengths = [length for table in tables for length in table["length"].to_pylist()]
        new.append(lengths)
        return np.array(lengths, dtype=float)

    view = View(lake, SCHEMA.id, selection=Selection(evaluate=evaluate, extend=extend))
    view.refresh()
    written = fill(lake, [7, 8], seal_every=1, seed=1)
    fill(lake, [9], schema=IMAGES)
    expire(lake, RetentionLimits(where=f"uid = '{min(written)}'"), grace_seconds=600)
    view.refresh()
    compact(lake, CompactionRules(settle_seconds=0.0), grace_seconds=0)
    view.refresh()
    assert whole == [2]
    assert [sorted(lengths) for lengths in new if lengths] == [[int(view.table["weight"][-1])]]
    assert len(view.table) == 3


class Gate:
    """An evaluation in a thread that waits until it is let through; its weight of a trajectory is `value`."""

    def __init__(self) -> None:
        self.value, self.error = 1.0, ""
        self._open = threading.Event()

    def evaluate(self, uids: np.ndarray) -> np.ndarray:
        return np.full(len(uids), self.value)

    def beside(self, uids: np.ndarray, listener: Listener) -> np.ndarray:
        while not self._open.wait(0.01):
            listener(Waiting(what="the gate"))
        if self.error:
            raise LimitReached(self.error)
        return np.arange(len(uids)) + self.value

    def finish(self, view: View) -> None:
        self._open.set()
        assert view._running is not None
        view._running._thread.join()
        self._open.clear()


def test_old_weights_stay_while_a_selection_is_evaluated_beside_the_caller(lake: Lake) -> None:
    written = list(fill(lake, [5, 6], seal_every=1))
    gate, told = Gate(), []
    selection = Selection(evaluate=gate.evaluate, beside=gate.beside)
    view = View(lake, SCHEMA.id, selection=selection, listener=told.append)
    view.refresh()
    fill(lake, [7], seed=1)
    view.refresh()  # asks for the weights of three
    assert view.table["weight"].tolist() == [1, 1, 0]
    expire(lake, RetentionLimits(where=f"uid = '{written[0]}'"), grace_seconds=600)
    compact(lake, CompactionRules(settle_seconds=0.0), grace_seconds=600)
    fill(lake, [8], seed=2)
    view.refresh()
    assert view.table["weight"].tolist() == [1, 0, 0]
    gate.finish(view)
    view.refresh()  # takes the weights, and asks again
    assert view.table["weight"].tolist() == [2, 3, 0]
    gate.finish(view)
    view.refresh()
    assert view.table["weight"].tolist() == [1, 2, 3]
    assert not told


def test_a_selection_beside_the_caller_that_meets_its_limit_is_a_notice(lake: Lake) -> None:
    fill(lake, [5, 6])
    gate, told = Gate(), []
    view = View(lake, SCHEMA.id, selection=Selection(evaluate=gate.evaluate, beside=gate.beside), listener=told.append)
    view.refresh()
    fill(lake, [7], seed=1)
    view.refresh()
    gate.error = "SQL: stopped at the time limit of 60 s"
    gate.finish(view)
    view.refresh()
    assert view.table["weight"].tolist() == [1, 1, 0]
    [notice] = told
    assert isinstance(notice, Notice)
    assert "time limit of 60 s" in notice.text
    gate.error = ""
    fill(lake, [8], seed=2)
    view.refresh()  # tries again with the next change
    gate.finish(view)
    view.refresh()
    assert view.table["weight"].tolist() == [1, 2, 3, 4]


def test_a_cancelled_selection_is_repeated(lake: Lake) -> None:
    fill(lake, [5])
    gate = Gate()
    view = View(lake, SCHEMA.id, selection=Selection(evaluate=gate.evaluate, beside=gate.beside))
    view.refresh()
    fill(lake, [7], seed=1)
    view.refresh()
    view.cancel()
    view.refresh()
    gate.finish(view)
    view.refresh()
    assert view.table["weight"].tolist() == [1, 2]


def test_another_process_takes_over_the_weights(lake: Lake) -> None:
    fill(lake, [5, 6], seal_every=1)
    gate = Gate()
    main = View(lake, SCHEMA.id, selection=Selection(evaluate=gate.evaluate, beside=gate.beside))
    other = View(lake, SCHEMA.id, selection=Selection(evaluate=lambda uids: np.full(len(uids), np.nan)))  # refused
    for step in range(4):
        main.refresh()
        other.refresh(main.collect_findings())
        np.testing.assert_array_equal(main.table, other.table)
        if step == 1:
            gate.finish(main)
        fill(lake, [7], seed=step + 1)
    assert main.table["weight"].tolist() == [1, 2, 3, 0, 0]


@pytest.mark.parametrize("grace", [0, 60])
def test_fixed_view_follows_its_trajectories_and_takes_in_no_others(lake: Lake, grace: float) -> None:
    fill(lake, [5, 6, 7, 8], seal_every=2)
    known = View(lake, SCHEMA.id)
    known.refresh()
    fill(lake, [9, 10], seed=1)
    view = View(lake, SCHEMA.id, fixed=True)
    view.restore(known.snapshot())
    fill(lake, [11, 12, 13, 14], seed=2, seal_every=1)
    compact(lake, CompactionRules(), grace_seconds=grace)
    assert view.refresh() == 0
    fill(lake, [15], seed=3)
    assert view.refresh() == 0
    assert view.uids().tolist() == known.uids().tolist()
    assert view.table["length"].tolist() == [5, 6, 7, 8]
    assert {segment.file for segment in view.segments} <= {*live_ids(lake)}
    expire(lake, RetentionLimits(where="length in (5, 8)"), grace_seconds=grace)
    later = View(lake, SCHEMA.id, fixed=True)
    with pytest.raises(InputMissing, match="no longer has 2 of its 4 trajectories"):
        later.restore(known.snapshot(), whole=True)
