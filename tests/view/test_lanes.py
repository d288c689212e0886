"""Lanes of windows against the columns as they were written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipelines.errors import InputMissing, UsageError
from pipelines.lake.folders import segment_key
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.store import Lake
from pipelines.view import lanes as module
from pipelines.view.columns import describe
from pipelines.view.lanes import StepWindow, lanes, numbers
from pipelines.view.steps import StepReader
from tests.lake.factories import SCHEMA, columns, derive, fill
from tests.view.lakes import PLAY, episode, put


def window(lake: Lake, uid: str, start: int, stop: int, points: int, *names: str) -> dict[str, Any]:
    reader = StepReader(lake)
    found = reader.find(uid)
    return lanes(reader, found, StepWindow.of(found.length, start, stop, points), names)


def test_a_short_window_has_every_step(lake: Lake) -> None:
    values = episode(10)
    uid = put(lake, values)
    found = window(lake, uid, 2, 6, 100, "obs.many", "action", "reward")
    assert (found["start"], found["stop"], found["exact"], found["t"]) == (2, 6, True, [2, 3, 4, 5])
    many, action, reward = found["lanes"]
    np.testing.assert_allclose(np.array(many["mean"]).T, values["obs.many"][2:6], rtol=1e-6)
    # The action and the reward of step t are in row t + 1.
    assert action["mean"][0] == values["action"][3:7].tolist()
    np.testing.assert_allclose(reward["mean"][0], values["reward"][3:7], rtol=1e-6)


def test_the_last_observation_has_no_action(lake: Lake) -> None:
    uid = put(lake, episode(3))
    found = window(lake, uid, 0, 99, 100, "obs.many", "action")
    assert found["t"] == [0, 1, 2, 3]
    assert found["lanes"][0]["mean"][0][3] is not None
    assert found["lanes"][1]["mean"][0][3] is None


def test_a_long_window_has_means_and_extremes(lake: Lake) -> None:
    values = columns(np.random.default_rng(0), 100)
    uid = put(lake, values, schema=SCHEMA)
    found = window(lake, uid, 0, 100, 10, "obs.state", "reward")
    assert (found["exact"], found["t"]) == (False, list(range(0, 100, 10)))
    state, reward = found["lanes"]
    parts = values["obs.state"][:100].reshape(10, 10, 3)
    paid = values["reward"][1:101].reshape(10, 10)
    np.testing.assert_allclose(np.array(state["mean"]).T, parts.mean(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.array(state["low"]).T, parts.min(1), rtol=1e-6)
    np.testing.assert_allclose(reward["high"][0], paid.max(1), rtol=1e-6)


def test_a_window_with_too_many_bytes_is_sampled(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    values = columns(np.random.default_rng(0), 100)
    uid = put(lake, values, schema=SCHEMA)
    monkeypatch.setattr(module, "_MOST_BYTES", 20 * 12)  # of 100 steps of 12 bytes
    found = window(lake, uid, 0, 100, 10, "obs.state")["lanes"][0]
    assert found["sampled"]
    parts = values["obs.state"][:100].reshape(10, 10, 3)[:, :2]
    np.testing.assert_allclose(np.array(found["mean"]).T, parts.mean(1), rtol=1e-5, atol=1e-6)


def test_of_a_wide_column_some_values_are_shown(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = put(lake, episode(10))
    monkeypatch.setattr(module, "_MOST_NUMBERS", 40)
    found = window(lake, uid, 0, 10, 10, "obs.many")["lanes"][0]
    assert (found["dims"], found["size"], len(found["mean"])) == (4, 9, 4)


def test_flags_are_marked_at_their_steps(lake: Lake) -> None:
    values = episode(10)
    values["reset"][[4, 7]] = 1
    values["truncated"][-1] = 1
    uid = put(lake, values)
    marks = {"reset": [4, 7], "terminated": [9], "truncated": [9]}
    assert window(lake, uid, 0, 11, 100)["marks"] == marks
    assert window(lake, uid, 5, 8, 100)["marks"]["reset"] == [7]
    assert window(lake, uid, 0, 9, 100)["marks"]["terminated"] == []


def test_texts_are_given_where_they_change(lake: Lake) -> None:
    uid = put(lake, episode(10, missions={0: "gö left", 4: "stay", 8: "gö left"}))
    (lane,) = window(lake, uid, 0, 11, 100, "obs.mission")["lanes"]
    assert (lane["kind"], lane["texts"]) == ("text", [[0, "gö left"], [4, "stay"], [8, "gö left"]])
    (lane,) = window(lake, uid, 3, 6, 100, "obs.mission")["lanes"]
    assert lane["texts"] == [[3, "gö left"], [4, "stay"]]


def test_invalid_code_points_become_replacement_characters(lake: Lake) -> None:
    values = episode(2)
    values["obs.mission"][:, :2] = (0xD800, 0x7FFFFFFF)
    (lane,) = window(lake, put(lake, values), 0, 3, 100, "obs.mission")["lanes"]
    assert lane["texts"] == [[0, "\ufffd\ufffd"]]


def test_an_overlay_has_its_own_columns_and_those_of_its_base(lake: Lake) -> None:
    written = fill(lake, [3, 12])
    base = list(written)[1]
    reward = np.arange(8, dtype=np.float32)
    (uid,) = derive(lake, {base: {"reward": reward}}, offset=5)
    reader = StepReader(lake)
    assert reader.find(uid).changed == ["reward", "terminated", "truncated"]
    assert reader.find(base).changed == []
    found = window(lake, uid, 0, 99, 100, "obs.state", "reward")["lanes"]
    np.testing.assert_allclose(np.array(found[0]["mean"]).T, written[base]["obs.state"][5:], rtol=1e-6)
    assert found[1]["mean"][0] == [*reward[1:].tolist(), None]


def test_pictures_and_unknown_columns_have_no_lane(lake: Lake) -> None:
    uid = put(lake, episode(3))
    assert window(lake, uid, 0, 3, 100, "obs.image", "obs.grid", "nothing")["lanes"] == []


def test_unknown_trajectories_are_missing(lake: Lake) -> None:
    put(lake, episode(3))
    with pytest.raises(InputMissing, match="no trajectory"):
        StepReader(lake).find("0" * 32)
    with pytest.raises(UsageError, match="32 hex digits"):
        StepReader(lake).find("' or true --")


@pytest.mark.system
def test_a_trajectory_is_found_again_after_compaction(lake: Lake) -> None:
    written = fill(lake, [3, 4, 5, 6], seal_every=1)
    reader = StepReader(lake)
    before = {uid: reader.find(uid).facts["segment"] for uid in written}
    compact(lake, grace_seconds=0)
    assert not any(lake.storage.exists(segment_key(segment)) for segment in before.values())
    for uid, values in written.items():
        np.testing.assert_array_equal(reader.rows(uid, "reward", 0, 4), values["reward"][:4])


def test_windows_stay_within_the_trajectory() -> None:
    assert StepWindow.of(10, -5, 10**9, 10**9) == StepWindow(0, 11, 10, 11)
    assert StepWindow.of(10, 50, 3, 0) == StepWindow(10, 11, 10, 1)
    assert StepWindow.of(10**7, 0, 10**7, 10**7).points == module.MOST_POINTS


def test_numbers_that_json_lacks_become_null() -> None:
    assert numbers(np.array([1.0, np.nan, np.inf, 0.1234567891])) == [1, None, None, 0.1234568]


def test_the_schema_of_these_tests_has_every_kind(lake: Lake) -> None:
    kinds = {column["name"]: column["kind"] for column in describe(PLAY)}
    assert kinds["obs.image"] == "image"
    assert kinds["obs.grid"] == "grid"
    assert kinds["obs.many"] == "vector"
    assert kinds["obs.mission"] == "text"
    assert kinds["action"] == "discrete"
    assert kinds["reward"] == "scalar"
    assert "obs.mission.length" not in kinds
