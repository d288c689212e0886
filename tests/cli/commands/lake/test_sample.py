from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.lake.store import Lake
from tests.cli.conftest import Amago
from tests.lake.factories import IMAGES, fill


def test_each_trajectory_has_a_heading_and_its_lines(amago: Amago, small: Path) -> None:
    shown = amago("lake", "sample", small, "-k", 2)
    assert shown.code == 0
    assert shown.out.count("gym:CartPole-v1") == 2
    assert shown.out.count("reward") == 2
    assert "obs[3]" in shown.out


def test_json_has_the_rows(amago: Amago, small: Path) -> None:
    found = amago("lake", "sample", small, "-k", 3, "--where", "length > 10", "--output", "json").json["trajectories"]
    assert len(found) == 3
    for row in found:
        sql = f"select length, policy_id from trajectories where uid = '{row['uid']}'"
        (known,) = amago("lake", "sql", small, sql, "--output", "json").json
        assert known.items() <= row.items()
        assert row["length"] > 10


def test_pictures_are_written(amago: Amago) -> None:
    fill(Lake.create("pictures"), [5, 6], schema=IMAGES)
    done = amago("lake", "sample", "pictures", "-k", 2, "--images", "out", "--output", "json")
    assert sorted(done.json["outputs"]) == sorted(str(path) for path in Path("out").iterdir())
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in done.json["outputs"])
    assert len(done.json["outputs"]) == 2


def test_a_lake_without_pictures_says_so(amago: Amago, small: Path) -> None:
    assert "none of the observations is an image" in amago("lake", "sample", small, "--images", "out").out


@pytest.mark.parametrize(
    ("options", "code"), [(["--where", "drop table x"], 2), (["--where", "length < 0"], 3), (["-k", "0"], 2)]
)
def test_what_cannot_be_drawn(amago: Amago, small: Path, options: list[str], code: int) -> None:
    assert amago("lake", "sample", small, *options).code == code


def test_values_are_shown_as_lines_and_step_by_step(amago: Amago, small: Path) -> None:
    shown = amago("lake", "sample", small, "-k", 1, "--where", "length <= 20", "--values", small)
    assert shown.code == 0, shown.err
    lines = [line.split() for line in shown.out.splitlines() if line.strip()]
    names = [line[0] for line in lines]
    assert {"q", "v", "advantage", "weight", "disagreement"} <= set(names)
    (header,) = [line for line in lines if line[0] == "step" and line[1] != "by"]
    assert header == ["step", "action", "reward", "q", "v", "advantage", "weight", "disagreement"]
    rows = [line for line in lines if len(line) == len(header) and line[0].isdigit()]
    assert [int(row[0]) for row in rows] == list(range(int(lines[0][2])))
    assert {row[1] for row in rows} <= {"0", "1"}


@pytest.mark.system
def test_values_in_json_are_those_of_every_step_and_discount(amago: Amago, small: Path) -> None:
    said = amago("lake", "sample", small, "-k", 2, "--values", f"{small}@3", "--output", "json").json
    discounts = said["values"]["discounts"]
    assert (said["values"]["update"], discounts[-1]) == (3, 0.998)  # 500 steps ahead, the longest episode
    for row in said["trajectories"]:
        values = row["values"]
        assert len(values["action"]) == len(values["reward"]) == row["length"]
        assert sum(values["reward"]) == pytest.approx(row["return"])
        for q, v, advantage, weight in zip(*(values[n] for n in ("q", "v", "advantage", "weight")), strict=True):
            assert len(q) == len(discounts)
            assert advantage == pytest.approx([a - b for a, b in zip(q, v, strict=True)], abs=1e-5)
            assert weight == [float(a > 0) for a in advantage]


def test_of_many_steps_those_with_the_largest_advantage_are_shown(amago: Amago, small: Path) -> None:
    options = ("-k", 1, "--where", "length > 25", "--values", small)
    found = amago("lake", "sample", small, *options, "--output", "json").json["trajectories"][0]
    advantage = [abs(step[-1]) for step in found["values"]["advantage"]]
    expected = sorted(sorted(range(len(advantage)), key=lambda step: -advantage[step])[:20])
    text = amago("lake", "sample", small, *options).out.partition("absolute advantage")[2]
    shown = [line.split() for line in text.splitlines()]
    assert [int(line[0]) for line in shown if line and line[0].isdigit()] == expected


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [("none", 3, "no run at 'none'"), ("small@7", 3, "no checkpoint 7"), ("small@x", 2, "'x' is not a checkpoint")],
)
def test_who_cannot_judge_is_named(amago: Amago, small: Path, name: str, code: int, said: str) -> None:
    refused = amago("lake", "sample", small, "--values", name)
    assert refused.code == code
    assert said in refused.err


def test_an_agent_of_other_spaces_is_refused(amago: Amago, small: Path) -> None:
    assert amago("collect", "--env", "tmaze", "--run", "maze", "--steps", 50, "-q").code == 0
    refused = amago("lake", "sample", "maze", "--values", small)
    assert refused.code == 3
    assert "was trained for other spaces: obs:" in refused.err
    assert "Traceback" not in refused.err


def test_episodes_in_pieces_are_shown_whole(amago: Amago) -> None:
    words = ("--env", "tmaze", "--steps", 66, "--actors", 2, "--set", "collect.chunk_steps=4", "--run", "a", "-q")
    assert amago("collect", *words, "--set", "collect.workers=0").code == 0
    text = "select length, chunks from episodes order by length"
    stored = amago("lake", "sql", "a", text, "--output", "json").json
    assert max(row["chunks"] for row in stored) > 1
    shown = amago("lake", "sample", "a", "-k", len(stored), "--output", "json").json["trajectories"]
    assert sorted(row["length"] for row in shown) == [row["length"] for row in stored]
