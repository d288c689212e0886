from __future__ import annotations

import numpy as np

from amago_cli.render.sparkline import flags, portrait, sparkline
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Discrete, Ragged, Spaces
from pipelines.lake.trajectory import Trajectory, TrajectoryInfo
from tests.lake.factories import IMAGES, MIXED, RAGGED, SCHEMA, columns

ROW = {
    "uid": "ab" * 16, "env": "maze", "task": "left", "length": 500, "return": 2.5, "success": True,
    "policy_id": "p", "policy_version": 3, "base_uid": None, "relabel_method": None,
}  # fmt: skip
MISSION = Schema(
    Spaces(
        observation={
            "obs.mission": Ragged(max_length=40, dtype="uint8", scale=255.0, text=True),
            "obs.mission.length": Discrete(n=41),
            "obs.place": Box(shape=(2,)),
        },
        action=Discrete(n=3),
    )
)


def drawn(schema: Schema, actions: int = 9, *, width: int = 100, **given: np.ndarray) -> dict[str, str]:
    """The lines of a trajectory of `schema`, by name; the columns `given` in place of random ones."""
    values = columns(np.random.default_rng(0), actions, schema) | given
    text = portrait(Trajectory(values, TrajectoryInfo()), ROW, schema, width=width, unicode=True)
    return {line[2:].partition("  ")[0].strip(): line for line in text.splitlines()[1:]}


def told(*texts: str) -> dict[str, np.ndarray]:
    """The columns of a mission that reads `texts`, step by step."""
    padded = [MISSION.spaces.observation["obs.mission"].pad(text) for text in texts]  # type: ignore[union-attr]
    lengths = np.array([length for _, length in padded], dtype=np.int32)
    return {"obs.mission": np.stack([row for row, _ in padded]), "obs.mission.length": lengths}


def test_a_character_stands_for_the_mean_of_its_share() -> None:
    assert sparkline(np.arange(8), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.array([0, 0, 1, 1, 0, 0, 0.5, 0.5]), 4) == "▁█▁▅"
    assert sparkline(np.arange(8), 80, unicode=False) == "_.-~=+*#"


def test_what_does_not_change_is_flat_and_what_is_no_number_breaks_nothing() -> None:
    assert sparkline(np.full(5, 3.0), 3) == "▁▁▁"
    assert len(sparkline(np.array([np.nan, 1.0, np.inf]), 3)) == 3


def test_flags_survive_being_drawn_together() -> None:
    zeros = np.zeros(100, dtype=np.uint8)
    values = {"reset": zeros.copy(), "truncated": zeros, "terminated": zeros.copy()}
    values["reset"][42], values["terminated"][99] = 1, 1
    assert flags(values, 10) == "....r....T"


def test_a_portrait_fits_the_terminal_and_shows_few_of_many_values() -> None:
    values = columns(np.random.default_rng(0), 500)
    text = portrait(Trajectory(values, TrajectoryInfo()), ROW, SCHEMA, width=70, unicode=True)
    heading, *lines = text.splitlines()
    assert heading == f"{'ab' * 16}  maze left: 500 steps, return 2.5, success, p@3"
    assert max(map(len, lines)) <= 70
    assert [line.split()[0] for line in lines] == [
        "reward", "action", "obs.state[0]", "obs.state[1]", "obs.state[2]", "obs.bits[0]", "obs.bits[1]", "flags",
    ]  # fmt: skip


def test_a_text_is_shown_as_text_where_it_changes() -> None:
    lines = drawn(MISSION, 3, **told("go to the ball", "go to the ball", "well done", "well done"))
    assert lines["obs.mission"].endswith("'go to the ball', 2: 'well done'")
    assert "obs.mission.length" not in lines
    assert "not shown" not in lines


def test_a_long_text_fits_the_terminal() -> None:
    long = drawn(MISSION, 1, width=40, **told("a" * 40, "b"))["obs.mission"]
    assert len(long) <= 40
    assert long.endswith("...")


def test_a_text_of_a_foreign_lake_is_escaped() -> None:
    assert "\x1b" not in drawn(MISSION, 1, **told("\x1b[2J", ""))["obs.place[0]"]
    assert "\\n" in drawn(MISSION, 1, **told("a\nb", ""))["obs.mission"]


def test_every_column_has_a_line_and_what_has_none_is_named() -> None:
    lines = drawn(MIXED)
    assert {"obs.flag", "obs.wide[0]", "obs.grid[0]"} <= set(lines)
    assert "obs.wide[4..199], obs.grid[1..5]" in lines["not shown"]
    assert "obs (20x20x3 pixels: --images DIR)" in drawn(IMAGES)["not shown"]


def test_sequence_of_printable_numbers_is_not_shown_as_text() -> None:
    numbers = Ragged(max_length=40, dtype="uint8", scale=255.0)
    spaces = {"obs.mission": numbers, "obs.mission.length": Discrete(n=41)}
    lines = drawn(Schema(Spaces(observation=spaces, action=Discrete(n=3))), 1, **told("abc", "abc"))
    assert "obs.mission (up to 40 uint8)" in lines["not shown"]
    assert "obs.mission.length" in lines
    assert "obs (up to 100 uint8)" in drawn(RAGGED)["not shown"]


def test_invalid_code_point_is_replaced() -> None:
    wide = Ragged(max_length=3, dtype="int32", scale=255.0, text=True)
    spaces = {"obs.mission": wide, "obs.mission.length": Discrete(n=4)}
    codes = np.array([[97, 0x110000, 98]] * 2, dtype=np.int32)
    given = {"obs.mission": codes, "obs.mission.length": np.full(2, 3, dtype=np.int32)}
    lines = drawn(Schema(Spaces(observation=spaces, action=Discrete(n=3))), 1, **given)
    assert "'a\ufffdb'" in lines["obs.mission"]
