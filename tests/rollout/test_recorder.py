"""The recorder gives back exactly what each actor saw, whatever the lengths of the episodes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.rollout.group import Recorder
from tests.tiers import examples

SCHEMA = Schema(Spaces(observation={"obs": Box(shape=(2,))}, action=Discrete(n=100)))


def row(rng, n):
    return {
        "observation": {"obs": rng.random((n, 2), dtype=np.float32)},
        "action": rng.integers(1, 100, n),
        "reward": rng.random(n, dtype=np.float32) + 1,
        "terminated": rng.random(n) < 0.3,
        "truncated": rng.random(n) < 0.1,
        "reset": rng.random(n) < 0.2,
    }


def check(columns, entries):
    assert set(columns) == {column.name for column in SCHEMA.columns}
    for name, column in columns.items():
        assert column.dtype == SCHEMA.column(name).dtype
        np.testing.assert_array_equal(column, [entry.get(name, 0) for entry in entries])


@examples(60)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 4), steps=st.integers(1, 60), rows=st.sampled_from([2, 3, 8]))
def test_equals_lists_kept_by_hand(seed, n, steps, rows):
    rng = np.random.default_rng(seed)
    recorder = Recorder(SCHEMA, n, rows=rows)
    first = rng.random((n, 2), dtype=np.float32)
    recorder.begin(np.arange(n), {"obs": first})
    kept = [[{"obs": first[i], "action": 0, "reward": 0.0}] for i in range(n)]
    for _ in range(steps):
        new = row(rng, n)
        recorder.add(**new)
        for i in range(n):
            kept[i].append(
                {"obs": new["observation"]["obs"][i]}
                | {k: new[k][i] for k in ("action", "reward", "terminated", "truncated", "reset")}
            )
            check(recorder.prefix(i), kept[i][:-1])
        chosen = rng.permutation(n)[: rng.integers(1, n + 1)]
        columns, counts = recorder.episodes(chosen)
        assert counts == [len(kept[i]) for i in chosen]
        check(columns, [entry for i in chosen for entry in kept[i]])
        assert recorder.lengths.tolist() == [len(entries) - 1 for entries in kept]
        over = np.flatnonzero(new["terminated"] | new["truncated"])
        if len(over):
            fresh = rng.random((n, 2), dtype=np.float32)
            recorder.begin(over, {"obs": fresh})
            for i in over:
                kept[i] = [{"obs": fresh[i], "action": 0, "reward": 0.0}]


def test_the_buffer_stays_as_small_as_the_longest_episode_needs():
    rng = np.random.default_rng(0)
    recorder = Recorder(SCHEMA, 2, rows=8)
    recorder.begin(np.arange(2), {"obs": np.zeros((2, 2), np.float32)})
    for step in range(1, 500):
        recorder.add(**row(rng, 2))
        if step % 10 == 0:
            recorder.begin(np.arange(2), {"obs": np.zeros((2, 2), np.float32)})
    assert recorder._rows <= 32
