"""relabel --with column:NAME:TYPE=VALUE: old trajectories are trained on together with those of an environment that
shows more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from pipelines.errors import InputMissing, UsageError
from pipelines.events import Event, Notice
from pipelines.lake import lineage
from pipelines.lake.maintenance.compaction import CompactionRules, compact
from pipelines.lake.reading import Reader
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Ragged, Space, format_type, parse_type
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.stages import collect, relabel, train
from pipelines.stages import library as stages
from pipelines.training.dataset import WindowDataset
from tests.lake.factories import SCHEMA, fill
from tests.stages.recipes import tiny

WIDE = Schema(SCHEMA.spaces.with_column("obs.wind", Box(shape=(2,))))
WIND = "column:obs.wind:float32[2]=0.5"


class Breeze(gymnasium.Env[dict[str, np.ndarray], int]):
    """Episodes of four steps; with `wind` it also shows the time, twice."""

    def __init__(self, wind: bool = False) -> None:
        names = ("here", "wind") if wind else ("here",)
        self.observation_space = gymnasium.spaces.Dict({n: gymnasium.spaces.Box(-9, 9, (2,)) for n in names})
        self.action_space = gymnasium.spaces.Discrete(2)
        self._time = 0

    def _observe(self) -> dict[str, np.ndarray]:
        return {name: np.full(2, self._time, dtype=np.float32) for name in self.observation_space}

    def reset(self, **_: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self._time = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        self._time += 1
        return self._observe(), float(action), self._time == 4, False, {}


ENV = f"{__name__}:Breeze"


def add(lake: Lake, *texts: str, **wanted: Any) -> dict[str, Any]:
    return relabel.run(tiny(relabel={"relabeler": list(texts), **wanted}), lake=lake.name).metrics


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("space", [Box(shape=(2,)), Box(shape=(20, 20, 3), dtype="uint8")], ids=["small", "image"])
def test_windows_of_old_and_new_trajectories(lake: Lake, compacted: bool, space: Box) -> None:
    value, shape = (0.5, (2,)) if space.dtype == "float32" else (7, (20, 20, 3))
    old = fill(lake, [3, 5, 4], seed=1, seal_every=2)
    assert add(lake, f"column:obs.wind:{format_type(space)}={value}")["trajectories"] == 3
    new = fill(lake, [2, 5], seed=2, schema=Schema(SCHEMA.spaces.with_column("obs.wind", space)))
    if compacted:
        compact(lake, CompactionRules(target_bytes=1 << 30), grace_seconds=0)
    expected = [{**columns, "obs.wind": np.full((len(columns["reward"]), *shape), value)} for columns in old.values()]
    expected += list(new.values())
    windows = WindowDataset(lake.name, length=5, batch_size=64, weighting="trajectory", seed=3)
    batch = next(iter(windows))
    met = set()
    for row, length in enumerate(batch["lengths"].tolist()):
        [found] = [
            number
            for number, columns in enumerate(expected)
            if len(columns["reward"]) == length
            and all(np.array_equal(batch[name][row, :length].numpy(), values) for name, values in columns.items())
        ]
        met.add(found)
    assert met == {0, 1, 2, 3, 4}


@pytest.mark.system
def test_added_columns_are_read_and_queried(lake: Lake) -> None:
    old = fill(lake, [3, 5])
    add(lake, 'column:obs.double:float64=2 * "reward"', "column:obs.kind:discrete[4]=3")
    reader = Reader(lake)
    derived = [uid for uid in reader.uids() if uid not in old]
    assert len(derived) == 2
    for uid in derived:
        base, values = old[reader.row(uid)["base_uid"].hex()], reader.read(uid).columns
        np.testing.assert_array_equal(values["obs.double"], 2 * base["reward"].astype(np.float64))
        assert values["obs.kind"].tolist() == [3] * len(base["reward"])
        np.testing.assert_array_equal(values["obs.state"], base["obs.state"])
    text = 'select count(*), sum("obs.kind") from steps where "obs.kind" is not null'
    assert query(lake, text)[1] == [(10, 30)]


@pytest.mark.system
def test_repeating_fills_what_is_new_once_with_whatever_value(lake: Lake) -> None:
    fill(lake, [3, 5])
    assert add(lake, WIND, where="length = 3")["trajectories"] == 1
    assert add(lake, WIND)["trajectories"] == 1
    assert add(lake, "column:obs.wind:float32[2]=7")["trajectories"] == 0
    fill(lake, [4], schema=WIDE, seed=1)
    fill(lake, [6], seed=2)
    assert add(lake, "column:obs.wind:float32[2]=7")["trajectories"] == 1
    assert query(lake, "select count(*) from trajectories where base_uid is not null")[1] == [(3,)]
    seen: list[Event] = []
    again = relabel.run(tiny(relabel={"relabeler": [WIND]}), lake=lake.name, listener=seen.append)
    assert again.status == "skipped"
    (told,) = (event.text for event in seen if isinstance(event, Notice) and "passed over" in event.text)
    assert told == "4 trajectories that have 'obs.wind' keep its value and are passed over"
    seen.clear()
    scaled = relabel.run(tiny(relabel={"relabeler": ["scale:2"]}), lake=lake.name, listener=seen.append)
    assert scaled.metrics["trajectories"] == 1  # of those that were recorded with all columns
    (warning,) = (event for event in seen if isinstance(event, Notice) and event.level == "warning")
    assert warning.text == "3 trajectories were recorded without obs.wind and are passed over"


@pytest.mark.parametrize("relabeler", ["scale:2", "label:nobody"])
def test_nothing_is_relabelled_where_all_lack_an_added_column(lake: Lake, relabeler: str) -> None:
    fill(lake, [4, 5])
    add(lake, "column:obs.wind:float32[2]=7")
    with pytest.raises(InputMissing, match=r"nothing to relabel: all 2 .* without obs\.wind"):
        add(lake, relabeler)


@pytest.mark.system
def test_collector_that_shows_more_is_refused_with_the_way_out_and_then_trained_on(tmp_path: Path) -> None:
    run, lake = tmp_path / "run", tmp_path / "lake"
    collect.run(tiny(env={"name": ENV}, collect={"steps": 40}), run=run, lake=lake)
    [(before,)] = query(Lake(lake), "select count(*) from trajectories")[1]
    windy = tiny(env={"name": ENV, "wind": True}, collect={"steps": 40})
    with pytest.raises(InputMissing, match=r"obs\.wind: nothing in the lake, box") as caught:
        collect.run(windy, run=tmp_path / "windy", lake=lake)
    text = "column:obs.wind:float32[2]=0"
    assert caught.value.hint is not None
    assert caught.value.hint.endswith(f"amago relabel --from-lake {lake} --with {text}")
    assert relabel.run(tiny(relabel={"relabeler": text}), lake=lake).metrics["trajectories"] == before
    collect.run(windy, run=tmp_path / "windy", lake=lake)
    [(both,)] = query(Lake(lake), "select count(*) from trajectories")[1]
    heard: list[Event] = []
    train.run(windy, run=tmp_path / "trained", lakes=[(lake, 1.0)], listener=heard.append)
    assert len(list(lineage.trajectories(tmp_path / "trained"))) == both - before
    assert not [event for event in heard if isinstance(event, Notice) and "lack" in event.text]
    collect.run(tiny(env={"name": ENV}), run=tmp_path / "more", lake=lake)
    [(all_of_them,)] = query(Lake(lake), "select count(*) from trajectories")[1]
    train.run(tiny(env={"name": ENV, "wind": True}), run=tmp_path / "again", lakes=[(lake, 1.0)], listener=heard.append)
    [warning] = [event.text for event in heard if isinstance(event, Notice) and "lack" in event.text]
    assert warning.startswith(
        f"{all_of_them - both} trajectories of lake '{lake}' lack obs.wind and are not drawn from; amago relabel"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("column:obs.wind", "not of the form NAME:TYPE=VALUE"),
        ("column:wind:float32=0", "a column is named obs.NAME"),
        ("column:obs.wind:float33=0", "'float33' is not a type"),
        ("column:obs.wind:float32[0]=0", "a size or number of choices is 0"),
        ("column:obs.wind:discrete[3]=3", "outside of 0 to 2"),
        ("column:obs.wind:uint8=1.5", "a number that is not uint8"),
        ("column:obs.wind:float32=nothing", "nothing"),
        ("column:obs.state:float32=0", "already"),
    ],
)
def test_wrong_columns_are_refused_and_nothing_is_written(lake: Lake, text: str, words: str) -> None:
    fill(lake, [3])
    with pytest.raises((UsageError, InputMissing), match=words):
        add(lake, text)
    assert lake.list_spaces() == [SCHEMA.spaces]


def test_another_type_than_that_of_the_lake_is_refused(lake: Lake) -> None:
    fill(lake, [3])
    fill(lake, [3], schema=WIDE, seed=1)
    with pytest.raises(InputMissing, match=r"obs\.wind: box\(shape=\[2\], dtype=float32\) in the lake"):
        add(lake, "column:obs.wind:float64[2]=0")
    assert len(lake.list_spaces()) == 2


@pytest.mark.system
def test_copies_and_windows_that_are_drawn_cannot_have_columns(lake: Lake, tmp_path: Path) -> None:
    fill(lake, [3])
    with pytest.raises(UsageError) as caught:
        add(lake, WIND, copies=2)
    assert "would all be alike" in caught.value.problems[0]
    with pytest.raises(UsageError, match="not for windows that are being drawn"):
        stages.train(lake.name, run=tmp_path / "run", steps=1, settings={"train.relabel.relabeler": [WIND]})


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (Box(shape=()), "float32"),
        (Box(shape=(8, 8, 3), dtype="uint8"), "uint8[8,8,3]"),
        (Box(shape=(), dtype="bool"), "bool"),
        (Discrete(n=5), "discrete[5]"),
        (MultiDiscrete(nvec=(3, 4)), "discrete[3,4]"),
        (MultiBinary(n=4), "binary[4]"),
        (Discrete(n=5, start=1), None),
        (MultiDiscrete(nvec=(3,)), None),
        (Ragged(max_length=3), None),
    ],
)
def test_types_as_text(space: Space, text: str | None) -> None:
    assert format_type(space) == text
    if text is not None:
        assert parse_type(text) == space


def test_columns_are_placed_as_gymnasium_does() -> None:
    spaces = Schema(SCHEMA.spaces).spaces.with_column("obs.a", Discrete(n=2))
    assert list(spaces.observation) == ["obs.state", "obs.bits", "obs.a"]
    ordered = type(spaces)(observation={"obs.a": Box(shape=()), "obs.c": Box(shape=())}, action=Discrete(n=2))
    assert list(ordered.with_column("obs.b", Box(shape=())).observation) == ["obs.a", "obs.b", "obs.c"]
