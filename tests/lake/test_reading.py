from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pipelines.errors import InputMissing, UsageError
from pipelines.lake.reading import draw, sample
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from tests.lake.factories import assert_same, fill


def test_different_trajectories_as_they_were_written(lake: Lake) -> None:
    written = fill(lake, [3, 4, 5, 6, 7], seal_every=2)
    found = list(sample(lake, 3, seed=1))
    assert len({one.row["uid"] for one in found}) == 3
    for one in found:
        assert_same(dict(one.trajectory.columns), written[one.row["uid"]])
        assert one.row["length"] == one.trajectory.length
    assert len(draw(lake, 9)) == 5


def test_the_same_seed_draws_the_same(lake: Lake) -> None:
    fill(lake, [3] * 40)
    assert draw(lake, 5, seed=4) == draw(lake, 5, seed=4) != draw(lake, 5, seed=5)
    assert draw(lake, 5, seed=4) == draw(lake, 5, where="true", seed=4)


@pytest.mark.system
def test_a_predicate_and_a_weight_decide_who_can_be_drawn(lake: Lake) -> None:
    fill(lake, [3, 4, 5, 6])
    (uid,) = draw(lake, 9, where="length = 5")
    assert query(lake, f"select length from trajectories where uid = '{uid}'")[1] == [(5,)]
    drawn = Counter(
        length for seed in range(40) for length in _lengths(lake, draw(lake, 1, weight="length - 3", seed=seed))
    )
    assert 3 not in drawn
    assert drawn[6] > drawn[4]


def test_single_draws_follow_the_weights(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the exact expectation: 1 : 2 : 5, within four standard deviations."""
    from pipelines.lake.sql import selection

    uids = np.array([b"a" * 16, b"b" * 16, b"c" * 16], dtype="S16")
    chosen = selection.SelectionResult(uids, np.array([1.0, 2.0, 5.0]), by_row=True)
    monkeypatch.setattr(selection, "select", lambda *arguments, **options: chosen)
    counts = Counter(draw(lake, 1, weight="w", seed=seed)[0][:2] for seed in range(4000))
    for name, share in (("61", 1 / 8), ("62", 2 / 8), ("63", 5 / 8)):
        assert abs(counts[name] - 4000 * share) < 4 * np.sqrt(4000 * share * (1 - share))


def test_nothing_to_draw_from(lake: Lake) -> None:
    with pytest.raises(InputMissing, match="no trajectories"):
        draw(lake, 1)
    fill(lake, [3])
    with pytest.raises(InputMissing, match="no trajectory that matches"):
        draw(lake, 1, where="length > 9")
    with pytest.raises(UsageError):
        draw(lake, 1, where="nothing > 9")


def _lengths(lake: Lake, uids: list[str]) -> list[int]:
    named = ", ".join(f"'{uid}'" for uid in uids)
    return [length for (length,) in query(lake, f"select length from trajectories where uid in ({named})")[1]]
