"""Published histories of learners in HDF5: XLand-100B's file of all tasks, Vintix's files of one history each."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.policy_files import list_checkpoints
from pipelines.config.settings import Settings, SourceSettings
from pipelines.errors import AmagoError, InputMissing, IntegrityError
from pipelines.events import Notice
from pipelines.formats import learning_histories
from pipelines.formats.make import open_importer
from pipelines.lake.spaces import Box, Discrete, MultiDiscrete, Spaces
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectory
from pipelines.stages import ingest, train
from tests.stages.recipes import tiny

h5py = pytest.importorskip("h5py")

# Episodes of each history: their lengths, and whether the goal was reached. The data ends within the last one.
PLAYED = [(3, True), (5, False), (1, True), (4, False), (2, False)]
STEPS = sum(length for length, _ in PLAYED)
ARRAYS = ("states", "actions", "rewards", "dones", "expert_actions")


def xland(path: Path, *, tasks: int = 2, histories: int = 3, played: list[tuple[int, bool]] = PLAYED) -> Path:
    """Write a file as the collection of XLand-100B combines its tasks: gzip, chunks of one history."""
    rng, steps = np.random.default_rng(0), sum(length for length, _ in played)
    with h5py.File(path, "w") as file:
        for task in range(tasks):
            group = file.create_group(str(task))
            group.attrs["env-id"] = "XLand-MiniGrid-R1-9x9"
            group.attrs["benchmark-id"], group.attrs["ruleset-id"] = "trivial-1m", np.int64(100 + task)
            dones, rewards = np.zeros((histories, steps), bool), np.zeros((histories, steps), np.float16)
            for end, (length, reached) in zip(np.cumsum([n for n, _ in played])[:-1], played[:-1], strict=True):
                dones[:, end - 1] = True
                rewards[:, end - 1] = 1 - 0.9 * length / 243 if reached else 0
            data = {
                "states": rng.integers(0, 13 * 12, (histories, steps, 5, 5)).astype(np.uint8),
                "actions": rng.integers(0, 6, (histories, steps)).astype(np.uint8),
                "rewards": rewards,
                "dones": dones,
                "expert_actions": rng.integers(0, 6, (histories, steps)).astype(np.uint8),
            }
            for name, values in data.items():
                chunks = (1, min(4096, steps), *values.shape[2:])
                group.create_dataset(name, data=values, chunks=chunks, compression="gzip", compression_opts=6)
    return path


def vintix(path: Path, lengths: list[int], *, group: int = 10, demonstrator: bool = False, seed: int = 0) -> Path:
    """Write a history as Vintix has it: groups of `group` steps, named by their first and last step."""
    rng, steps = np.random.default_rng(seed), sum(lengths)
    data = {
        "proprio_observation": rng.normal(size=(steps, 3)).astype(np.float32),
        "action": rng.uniform(-1, 1, (steps, 2)).astype(np.float32),
        "reward": rng.normal(size=steps).astype(np.float32),
        "step_num": np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
    }
    if demonstrator:
        data["demonstrator_action"] = rng.uniform(-1, 1, (steps, 2)).astype(np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for first in range(0, steps, group):
            for name, values in data.items():
                file[f"{first}-{min(first + group, steps) - 1}/{name}"] = values[first : first + group]
    return path


def read(
    name: object, *, start: int = 0, spaces: Spaces | None = None, **settings: Any
) -> tuple[Any, list[Trajectory]]:
    source = open_importer(SourceSettings(name=str(name), **settings), spaces=spaces)
    try:
        return source, [trajectory for batch in source.batches(start) for trajectory in batch]
    finally:
        source.close()


@pytest.mark.parametrize("kind", ["", "hdf5:", "xland:"])
def test_every_step_of_xland_is_read(tmp_path: Path, kind: str) -> None:
    path = xland(tmp_path / "xland.hdf5")
    source, found = read(f"{kind}{path}")
    assert source.spaces.action == Discrete(n=6)
    assert source.spaces.observation == {"obs.cells": MultiDiscrete(nvec=(13, 12) * 25)}
    assert (source.labelled, source.steps, source.env) == (True, 6 * STEPS, "XLand-MiniGrid-R1-9x9")
    assert len(found) == 2 * 3 * len(PLAYED)
    with h5py.File(path) as file:
        data = {(task, name): file[f"{task}/{name}"][()] for task in range(2) for name in ARRAYS}
    number = 0
    for task in range(2):
        for row in range(3):
            at = 0
            for index, (length, reached) in enumerate(PLAYED):
                got, number = found[number], number + 1
                # What the last action of an episode led to is not stored: it is dropped unless the goal ended it.
                steps = length if reached else length - 1
                assert got.length == steps
                for step in range(steps):
                    cells = got.columns["obs.cells"][step].reshape(5, 5, 2)
                    code = data[task, "states"][row, at + step].astype(int)
                    np.testing.assert_array_equal(cells[..., 0], code // 12)
                    np.testing.assert_array_equal(cells[..., 1], code % 12)
                for name, theirs in (("action", "actions"), ("reward", "rewards")):
                    wanted = data[task, theirs][row, at : at + steps].astype(np.float32)
                    np.testing.assert_array_equal(got.columns[name], [0, *wanted])
                wanted = data[task, "expert_actions"][row, at : at + steps]
                np.testing.assert_array_equal(got.columns["label"], [*wanted, 0])
                assert (got.columns["terminated"][-1], got.columns["truncated"][-1]) == (reached, not reached)
                assert not got.columns["terminated"][:-1].any()
                info = got.info
                assert (info.task, info.success, info.history_index) == (f"trivial-1m/{100 + task}", reached, index)
                assert info.history == f"xland/{task}.{row}/trivial-1m/{100 + task}"
                assert info.tags["final_observation"] == ("repeated" if reached else "last step dropped")
                at += length
    assert number == len(found)


@pytest.mark.parametrize("group", [1, 4, 10, 100])
@pytest.mark.parametrize("demonstrator", [False, True])
def test_episodes_of_vintix_go_on_from_group_to_group(tmp_path: Path, group: int, demonstrator: bool) -> None:
    lengths = [7, 12, 10, 3, 1, 5]
    path = vintix(tmp_path / "hopper" / "h.h5", lengths, group=group, demonstrator=demonstrator)
    (path.parent / "hopper.json").write_text(json.dumps({"task_name": "Hopper-v4", "action_dim": 2}))
    source, found = read(f"vintix:{path}")
    assert source.labelled == demonstrator
    assert source.spaces.observation == {"obs": Box(shape=(3,))}
    with h5py.File(path) as file:
        groups = sorted(file, key=lambda name: int(name.split("-")[0]))
        data = {name: np.concatenate([file[each][name] for each in groups]) for name in file[groups[0]]}
    # The episode of one step has none left without its last.
    assert [one.info.history_index for one in found] == [0, 1, 2, 3, 5]
    assert source.dropped == 1
    for one in found:
        at = sum(lengths[: one.info.history_index])
        steps = lengths[one.info.history_index] - 1
        np.testing.assert_array_equal(one.columns["obs"], data["proprio_observation"][at : at + steps + 1])
        np.testing.assert_array_equal(one.columns["action"][1:], data["action"][at : at + steps])
        np.testing.assert_array_equal(one.columns["reward"][1:], data["reward"][at : at + steps])
        if demonstrator:
            np.testing.assert_array_equal(one.columns["label"][:-1], data["demonstrator_action"][at : at + steps])
        assert one.columns["truncated"][-1]
        assert (one.info.env, one.info.task, one.info.history) == ("Hopper-v4", "Hopper-v4", "h/h/Hopper-v4")


def test_a_time_limit_tells_which_episodes_of_vintix_terminated(tmp_path: Path) -> None:
    path = vintix(tmp_path / "h.h5", [7, 12, 10, 12, 4], group=5)

    def ends(**settings: Any) -> list[bool]:
        return [bool(one.columns["terminated"][-1]) for one in read(f"vintix:{path}", **settings)[1]]

    # The data ends within the last episode, or with it: nothing says that it terminated.
    assert ends(horizon=12) == [True, False, True, False, False]
    assert ends(horizon=0) == [True, True, True, True, False]
    told: list[str] = []
    settings = SourceSettings(name=f"vintix:{path}")
    source = open_importer(
        settings, listener=lambda event: told.append(event.text) if isinstance(event, Notice) else None
    )
    assert not any(batch.columns["terminated"].any() for batch in source.batches())
    source.close()
    assert [text for text in told if "how episodes ended" in text] == told[:1]


def test_a_folder_of_vintix_has_a_history_in_each_file(tmp_path: Path) -> None:
    for number, name in enumerate(["b.h5", "a.h5"]):
        vintix(tmp_path / "data" / "ant" / name, [4, 6], seed=number)
    found = read(f"vintix:{tmp_path / 'data' / 'ant'}")[1]
    assert [(one.info.history, one.info.history_index) for one in found] == [
        ("ant/a/ant", 0),
        ("ant/a/ant", 1),
        ("ant/b/ant", 0),
        ("ant/b/ant", 1),
    ]
    with pytest.raises(InputMissing, match="no HDF5 files") as caught:
        read(f"vintix:{tmp_path / 'data'}")
    assert caught.value.hint == "name the folder of one task: ant"


@pytest.mark.system
@pytest.mark.parametrize("make", [xland, lambda path: vintix(path, [3, 1, 4, 2, 6], group=4)], ids=["xland", "vintix"])
def test_reading_goes_on_from_any_number(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    name = make(tmp_path / "x.h5")
    whole = read(name)[1]
    for start in range(int(whole[-1].info.tags["episode"]) + 2):
        wanted = [one for one in whole if int(one.info.tags["episode"]) >= start]
        found = read(name, start=start)[1]
        assert [one.info for one in found] == [one.info for one in wanted]
        for one, other in zip(found, wanted, strict=True):
            for column, values in other.columns.items():
                np.testing.assert_array_equal(one.columns[column], values)


def test_blocks_do_not_change_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = xland(tmp_path / "x.h5")
    whole = read(path)[1]
    monkeypatch.setattr(learning_histories, "BATCH_BYTES", 1)
    with h5py.File(path, "r+") as file:
        for name in ARRAYS:
            values = file[f"0/{name}"][()]
            del file[f"0/{name}"]
            file.create_dataset(f"0/{name}", data=values, chunks=(1, 2, *values.shape[2:]))
    for one, other in zip(read(path)[1], whole, strict=True):
        assert one.info == other.info
        np.testing.assert_array_equal(one.columns["obs.cells"], other.columns["obs.cells"])
        np.testing.assert_array_equal(one.columns["label"], other.columns["label"])


@pytest.mark.system
def test_memory_does_not_grow_with_the_length_of_a_history(tmp_path: Path) -> None:
    peaks = []
    for count in (400, 1_600):
        path = xland(tmp_path / f"{count}.h5", tasks=1, histories=1, played=[(200, True)] * count)
        source = open_importer(SourceSettings(name=f"xland:{path}"))
        tracemalloc.start()
        try:
            assert sum(sum(batch.rows) for batch in source.batches()) >= 200 * count
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
            source.close()
    assert peaks[1] < 1.2 * peaks[0]


def change(path: Path, alter: Callable[[Any], None]) -> Path:
    with h5py.File(path, "r+") as file:
        alter(file)
    return path


def replaced(name: str, values: Any) -> Callable[[Any], None]:
    def alter(file: Any) -> None:
        del file[name]
        file[name] = values

    return alter


def damaged_chunk(file: Any) -> None:
    file["1/states"].id.write_direct_chunk((0, 0, 0, 0), b"not deflated")


SHAPE = (3, STEPS)
WRONG: list[tuple[str, Callable[[Any], None], type[AmagoError], str]] = [
    *[("xland", lambda f, n=n: f.__delitem__(f"1/{n}"), InputMissing, f"'{n}' is missing") for n in ARRAYS],
    ("xland", lambda f: f.move("1", "7"), InputMissing, "'1' is missing: its 2 groups are not numbered"),
    ("xland", lambda f: f["1"].attrs.__delitem__("ruleset-id"), InputMissing, "group '1' lacks the attributes"),
    ("xland", replaced("1/actions", np.zeros((3, 14), np.uint8)), IntegrityError, "arrays of different shapes"),
    ("xland", replaced("1/states", np.zeros((*SHAPE, 5, 5, 2), np.uint8)), IntegrityError, "different shapes"),
    ("xland", replaced("1/states", np.full((*SHAPE, 5, 5), 156, np.uint8)), InputMissing, "outside its space"),
    ("xland", replaced("1/states", np.zeros((*SHAPE, 5, 5), np.float32)), InputMissing, "'1/states' holds float32"),
    ("xland", replaced("1/actions", np.full(SHAPE, 6, np.uint8)), InputMissing, "'action' is outside its space of 6"),
    ("xland", replaced("1/actions", np.full(SHAPE, 0.5)), InputMissing, "'action' cannot be stored as int32"),
    ("xland", replaced("1/expert_actions", np.full(SHAPE, 6, np.uint8)), InputMissing, "'label' is outside its space"),
    ("xland", replaced("1/rewards", np.full(SHAPE, np.nan, np.float16)), IntegrityError, "'reward' is not finite"),
    ("xland", replaced("1/rewards", np.full(SHAPE, b"1")), InputMissing, "'1/rewards' holds"),
    ("xland", replaced("1/dones", np.full(SHAPE, np.nan)), IntegrityError, "'1/dones' is NaN"),
    ("xland", damaged_chunk, IntegrityError, "is damaged"),
    ("vintix", lambda f: f.__delitem__("5-9"), IntegrityError, "'10-14' should begin with step 5"),
    ("vintix", lambda f: f.__delitem__("0-4"), IntegrityError, "'5-9' should begin with step 0"),
    ("vintix", lambda f: f.move("5-9", "later"), InputMissing, "'later' is not a group of Vintix"),
    ("vintix", lambda f: f.__delitem__("5-9/action"), InputMissing, "'action' is missing"),
    ("vintix", replaced("5-9/reward", np.zeros(4, np.float32)), IntegrityError, "should have 5 steps: reward 4"),
    ("vintix", replaced("5-9/reward", np.zeros((5, 2), np.float32)), InputMissing, "'5-9/reward' has the shape"),
    ("vintix", replaced("5-9/step_num", [5, 6, 8, 9, 10]), IntegrityError, "'5-9/step_num' is 8 at step 7, 7 or 0"),
    ("vintix", replaced("5-9/step_num", np.arange(5, 10.0)), InputMissing, "step_num' holds float64, not integers"),
    ("vintix", replaced("0-4/step_num", np.arange(1, 6)), IntegrityError, "is 1 at step 0, 0 or 0 expected"),
    ("vintix", replaced("5-9/action", np.full((5, 2), 3.0, np.float32)), InputMissing, "an action is 3"),
    ("vintix", replaced("5-9/action", np.zeros((5, 4), np.float32)), InputMissing, "'action' has 4"),
    (
        "vintix",
        replaced("5-9/demonstrator_action", np.zeros((5, 4), np.float32)),
        InputMissing,
        "'label' has the shape",
    ),
    ("vintix", lambda f: f.__delitem__("5-9/demonstrator_action"), InputMissing, "'demonstrator_action' is missing"),
    ("vintix", replaced("5-9/proprio_observation", np.zeros((5, 9))), InputMissing, "'obs' has 9"),
    ("vintix", replaced("5-9/proprio_observation", np.full((5, 3), np.inf)), IntegrityError, "'obs' is not finite"),
]


@pytest.mark.parametrize(("kind", "alter", "error", "words"), WRONG)
def test_wrong_files_are_refused_and_nothing_is_written(
    tmp_path: Path, kind: str, alter: Any, error: type[AmagoError], words: str
) -> None:
    path = (
        xland(tmp_path / "x.h5") if kind == "xland" else vintix(tmp_path / "x.h5", [8, 12], group=5, demonstrator=True)
    )
    change(path, alter)
    settings = Settings.model_validate({"source": {"name": f"{kind}:{path}"}})
    with pytest.raises(error, match=words) as caught:
        ingest.run(settings, lake=tmp_path / "lake")
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == (3 if error is InputMissing else 4)
    assert not (tmp_path / "lake").exists()


def test_arrays_that_claim_more_than_the_file_holds_are_refused(tmp_path: Path) -> None:
    path = xland(tmp_path / "x.h5")

    def swell(file: Any) -> None:
        for name in ARRAYS:
            shape, dtype = file[f"1/{name}"].shape, file[f"1/{name}"].dtype
            del file[f"1/{name}"]
            file.create_dataset(f"1/{name}", (1, 10**12, *shape[2:]), dtype, chunks=(1, 4096, *shape[2:]))

    with pytest.raises(IntegrityError, match=r"'1/states' claims 25,000,000,000,000 bytes"):
        read(f"xland:{change(path, swell)}")


def test_endless_episodes_are_refused(tmp_path: Path) -> None:
    path = vintix(tmp_path / "x.h5", [4, 50], group=10)
    with pytest.raises(InputMissing, match="episode 1 of history 'x' has more than 20 steps") as caught:
        read(f"vintix:{path}", longest=20)
    assert caught.value.hint == "set source.longest higher"
    assert len(read(f"vintix:{path}", longest=50)[1]) == 2


@pytest.mark.parametrize("kind", ["xland", "vintix"])
def test_a_missing_file_and_settings_without_effect_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(InputMissing, match="no file"):
        read(f"{kind}:{tmp_path / 'none.h5'}")
    with pytest.raises(InputMissing, match=r"source\.columns does not apply"):
        read(f"{kind}:{xland(tmp_path / 'x.h5')}", columns={"obs": "states"})


def test_other_spaces_are_refused(tmp_path: Path) -> None:
    spaces = Spaces(observation={"obs": Box(shape=(4,))}, action=Discrete(n=6))
    with pytest.raises(InputMissing, match="does not fit the environment"):
        read(f"xland:{xland(tmp_path / 'x.h5')}", spaces=spaces)


@pytest.mark.system
@pytest.mark.parametrize("kind", ["xland", "vintix"])
@pytest.mark.parametrize("target", ["action", "label"])
def test_agents_learn_from_windows_over_imported_histories(tmp_path: Path, kind: str, target: str) -> None:
    if kind == "xland":
        xland(tmp_path / "x.h5")
    else:
        vintix(tmp_path / "x.h5", [8, 12, 5, 9, 3], group=7, demonstrator=True)
    ingest.run(Settings.model_validate({"source": {"name": f"{kind}:{tmp_path / 'x.h5'}"}}), lake=tmp_path / "lake")
    histories = query(Lake(tmp_path / "lake"), "select history, episodes from histories order by history")[1]
    assert histories == (
        [(f"x/{task}.{row}/trivial-1m/{100 + task}", 5) for task in range(2) for row in range(3)]
        if kind == "xland"
        else [("x/x/x", 5)]
    )
    settings = tiny(
        agent={"kind": "behaviour-cloning", "target": target, "sequence": {"position": "rope"}},
        train={"steps": 3, "context": "history", "context_length": 20},
    )
    done = train.run(settings, run=tmp_path / "run", lakes=[(tmp_path / "lake", 1.0)])
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1] == 3
    assert np.isfinite(done.metrics["loss"])
