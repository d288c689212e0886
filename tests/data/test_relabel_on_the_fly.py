"""Windows of versions that are made as they are drawn are windows of the versions that `relabel` stores."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pipelines.config.settings import ReplaySettings
from pipelines.data.strategy import Strategy
from pipelines.data.view import Selection, View
from pipelines.errors import InputMissing, UsageError
from pipelines.events import silent
from pipelines.lake.reading import trajectories
from pipelines.lake.sql.selection import select
from pipelines.lake.store import Lake
from pipelines.stages import collect, relabel
from pipelines.training.data import make_versions
from tests.data.seeded import SeededSampler
from tests.data.test_strategy import WINDOW, places
from tests.stages.recipes import tiny
from tests.tiers import some

# As a shell reads it: a line that ends in a backslash goes on in the next.
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "relabelling.md").read_text().replace("\\\n", "")
ENVS = {
    "mazerunner": {"name": "mazerunner", "size": 9, "goals": 3, "max_episode_steps": 30},
    "goal-frozen-lake": {"name": "goal-frozen-lake"},
}
# Goals that do not end an episode, as those of Fetch and PointMaze.
ENDLESS = {"tolerance": 0.1, "reward": 0.0, "step_reward": -1.0, "ends": False}


def sampler(lake: Lake, settings: ReplaySettings, *, seed: int = 5, placement: str = "uniform") -> SeededSampler:
    schema = lake.only_schema()
    view = View(lake, schema.id)
    view.refresh()
    versions = make_versions(lake, schema, settings, seed=seed, listener=silent)
    return SeededSampler(view, length=WINDOW, seed=1, strategy=Strategy(placement=placement), versions=versions)


def windows(batch):
    """Each window's real rows of every column, and where it begins."""
    for i, rows in enumerate(batch.lengths.tolist()):
        yield int(batch.start[i]), {name: values[i, :rows] for name, values in batch.columns.items()}


@pytest.mark.system
@pytest.mark.parametrize("chunk_steps", [0, 3])
@pytest.mark.parametrize("placement", some(["uniform", "full"], 0))
@pytest.mark.parametrize(
    ("env", "relabelers", "goal"),
    [
        ("mazerunner", ("instruction:some", "scale:2"), {}),
        ("goal-frozen-lake", ("hindsight:future",), {}),
        ("goal-frozen-lake", ("hindsight:future",), ENDLESS),
        ("goal-frozen-lake", ("hindsight:random",), ENDLESS),
    ],
)
def test_drawn_versions_are_the_stored_ones(
    tmp_path: Path, env: str, relabelers: tuple[str, ...], goal: dict[str, object], placement: str, chunk_steps: int
) -> None:
    settings = tiny(env=ENVS[env], collect={"steps": 240, "chunk_steps": chunk_steps})
    collect.run(settings, lake=tmp_path / "lake")
    lake = Lake(tmp_path / "lake")
    replay = ReplaySettings(relabeler=relabelers, share=1.0, copies=3, goal=goal)
    drawn = sampler(lake, replay, placement=placement)
    batches = [drawn.sample(16) for _ in range(12)]
    again = sampler(lake, replay, placement=placement)
    np.testing.assert_array_equal(again.sample(16).columns["reward"], batches[0].columns["reward"])
    stored = tiny(seed=5, env=ENVS[env], relabel={"relabeler": relabelers, "copies": 3, "goal": goal})
    relabel.run(stored, lake=tmp_path / "lake")
    known, relabelled = {}, 0
    for each in trajectories(lake):
        for start, stop in set(places(each.length, placement)):
            window = {name: values[start : stop + 1] for name, values in each.columns.items()}
            known.setdefault(digest(each.info.first_step + start, window), set()).add(each.info.source)
    for batch in batches:
        for start, window in windows(batch):
            sources = known[digest(start, window)]  # a KeyError: no stored trajectory has such a window
            relabelled += sources == {"relabel"}
        for i, rows in enumerate(batch.lengths.tolist()):
            assert all(not values[i, rows:].any() for values in batch.columns.values())
    assert relabelled > 30


def digest(start, window):
    return start, b"".join(name.encode() + np.ascontiguousarray(window[name]).tobytes() for name in sorted(window))


@pytest.mark.system
def test_a_share_of_the_windows_and_of_the_trajectories(tmp_path: Path) -> None:
    # 40 trajectories: their uids, which decide, differ from run to run
    collect.run(tiny(env=ENVS["mazerunner"], collect={"steps": 1200}), lake=tmp_path / "lake")
    lake = Lake(tmp_path / "lake")

    def doubled(**settings):
        drawn = sampler(lake, ReplaySettings(relabeler=("reward:7",), **settings))
        found = [
            (b.trajectory[i], b.columns["reward"][i, 1])
            for b in (drawn.sample(64) for _ in range(20))
            for i in range(64)
        ]
        return np.array(found)

    assert 0.2 < (doubled(share=0.3)[:, 1] == 7).mean() < 0.4
    some = doubled(share=1.0, fraction=0.5)
    assert 0 < len(set(some[some[:, 1] == 7, 0])) < len(set(some[:, 0]))
    assert not (doubled(share=1.0, where="length < 0")[:, 1] == 7).any()


def test_what_is_wrong_is_said_before_anything_is_drawn(tmp_path: Path) -> None:
    collect.run(tiny(), lake=tmp_path / "lake")
    lake = Lake(tmp_path / "lake")
    with pytest.raises(InputMissing, match="'tmaze' has no goal rule"):
        sampler(lake, ReplaySettings(relabeler=("hindsight",)))
    with pytest.raises(UsageError, match="nothing"):
        sampler(lake, ReplaySettings(relabeler=("reward:nothing",)))


def test_a_weight_makes_three_quarters_of_the_drawn_steps_relabelled(tmp_path: Path) -> None:
    """As three relabelled copies of each step would be; `future` leaves out the steps before a random one."""
    env = ENVS["goal-frozen-lake"]
    collect.run(tiny(env=env, collect={"steps": 1000}), lake=tmp_path / "lake")
    relabel.run(tiny(env=env, relabel={"relabeler": "hindsight:future", "copies": 3}), lake=tmp_path / "lake")
    lake = Lake(tmp_path / "lake")
    weight = re.search(r'--weight "(case when base_uid.*?)"', PAGE, re.DOTALL)
    assert weight is not None
    chosen = select(lake, weight=weight[1])
    view = View(lake, lake.only_schema().id, selection=Selection(evaluate=chosen.weights_of))
    view.refresh()
    drawn = SeededSampler(view, length=WINDOW, seed=1)
    derived = np.isin(view.uids(), [bytes.fromhex(each.uid) for each in trajectories(lake, "base_uid is not null")])
    steps = {True: 0, False: 0}
    for batch in (drawn.sample(64) for _ in range(40)):
        for number, rows in zip(batch.trajectory.tolist(), batch.lengths.tolist(), strict=True):
            steps[bool(derived[number])] += rows - 1
    assert 0.71 < steps[True] / sum(steps.values()) < 0.79
