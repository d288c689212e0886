from __future__ import annotations

import numpy as np

from amago_cli.sparkline import flags, portrait, sparkline
from pipelines.lake.trajectory import Trajectory, TrajectoryInfo
from tests.lake.factories import SCHEMA, columns


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
    row = {
        "uid": "ab" * 16, "env": "maze", "task": "left", "length": 500, "return": 2.5, "success": True,
        "policy_id": "p", "policy_version": 3, "base_uid": None, "relabel_method": None,
    }  # fmt: skip
    text = portrait(Trajectory(values, TrajectoryInfo()), row, SCHEMA, width=70, unicode=True)
    heading, *lines = text.splitlines()
    assert heading == f"{'ab' * 16}  maze left: 500 steps, return 2.5, success, p@3"
    assert max(map(len, lines)) <= 70
    assert [line.split()[0] for line in lines] == [
        "reward", "action", "obs.state[0]", "obs.state[1]", "obs.state[2]", "obs.bits[0]", "obs.bits[1]", "flags",
    ]  # fmt: skip
