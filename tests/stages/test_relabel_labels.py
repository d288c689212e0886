"""relabel --with label:POLICY: labels that are added afterwards are those that collecting would have stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.settings import LearnerSettings, Settings
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.maintenance.compaction import CompactionRules, compact
from pipelines.lake.maintenance.copying import copy
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.reading import Reader, join_pieces
from pipelines.lake.schema import LABEL, Schema
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.rollout.learners import make_learner, replay_histories
from pipelines.stages import collect, relabel, train
from pipelines.stages.train import Source
from tests.rollout.test_learners import learn_from
from tests.stages.recipes import tiny

ROOM = {"name": "dark-room", "size": 5, "attempts": 2, "attempt_steps": 7}
POLICY = "tests.stages.test_relabel_labels:count_rewards"


def count_rewards(observation: Any, action: np.ndarray, reward: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Act by the observation, the action and the reward before it, and the time."""
    return (np.rint(observation["obs"][:, 0] * 5).astype(int) + action + reward.astype(int) + time) % 5


class Counter:
    """A policy with a memory: it counts the ones among its episode's actions."""

    def __init__(self, *, spaces: Any, num_actors: int, seed: int) -> None:
        self.seen = np.zeros(num_actors, dtype=int)

    def act(self, observation: Any, action: np.ndarray, reward: np.ndarray, time: np.ndarray) -> np.ndarray:
        self.seen[time == 0] = 0
        self.seen += action == 1
        return self.seen % 5


def settings(**tables: Any) -> Settings:
    return tiny(**({"env": ROOM} | tables))


def imitating(**train: Any) -> Settings:
    agent = {"kind": "behaviour-cloning", "gammas": [], "target": "label", "sequence": {"position": "rope"}}
    return settings(agent=agent, train=train)


def label(lake: Path, policy: str, **wanted: Any) -> dict[str, Any]:
    text = f"label:{policy}"
    return relabel.run(settings(relabel={"relabeler": text, **wanted}), lake=lake).metrics


def read_labels(place: Path, where: str) -> dict[tuple[Any, ...], dict[str, np.ndarray]]:
    """Read whole episodes by what distinguishes those of one collector."""
    lake = Lake(place)
    reader, found = Reader(lake), {}
    text = f"select uids from episodes where complete and {where}"
    for (uids,) in query(lake, text)[1]:
        joined = join_pieces([reader.read(uid).columns for uid in uids])
        key = tuple(joined[name].tobytes() for name in ("obs", "action", "reward"))
        found[key] = joined
    return found


def collect_both(tmp_path: Path, policy: str, **wanted: Any) -> tuple[Path, Path]:
    """Collect the same episodes with labels and without."""
    env = wanted.pop("env", ROOM)
    for name, more in (("with", {"label": policy}), ("without", {})):
        collect.run(tiny(env=env, collect={"steps": 200, "actors": 3, **wanted, **more}), lake=tmp_path / name)
    return tmp_path / "with", tmp_path / "without"


def assert_equal_labels(labelled: Path, relabelled: Path, least: int) -> None:
    theirs, ours = read_labels(labelled, "base_uid is null"), read_labels(relabelled, "base_uid is not null")
    assert ours.keys() == theirs.keys()
    assert sum(len(columns[LABEL]) - 1 for columns in ours.values()) >= least
    for key, columns in ours.items():
        for name in theirs[key]:
            np.testing.assert_array_equal(columns[name], theirs[key][name], err_msg=name)


@pytest.mark.system
@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("policy", ["expert", POLICY, POLICY.replace("count_rewards", "Counter")])
def test_labels_equal_those_of_collecting(tmp_path: Path, policy: str, chunk: int) -> None:
    labelled, plain = collect_both(tmp_path, policy, chunk_steps=chunk)
    assert label(plain, policy)["trajectories"] > 10
    assert_equal_labels(labelled, plain, 150)


@pytest.mark.system
@pytest.mark.parametrize("env", [{"name": "tmaze", "corridor": 4}, {"name": "dark-key-door", "size": 3, "horizon": 20}])
def test_experts_of_other_environments_label_alike(tmp_path: Path, env: dict[str, Any]) -> None:
    labelled, plain = collect_both(tmp_path, "expert", env=env)
    label(plain, "expert")
    assert_equal_labels(labelled, plain, 150)


@pytest.mark.system
def test_a_trained_run_labels_with_its_memory_over_whole_episodes(tmp_path: Path) -> None:
    """The run's context is shorter than an episode, and some episodes are stored in pieces."""
    run = tmp_path / "run"
    collect.run(settings(), lake=tmp_path / "seen")
    label(tmp_path / "seen", "expert")
    wanted = imitating(steps=60, batch_size=16, learning_rate=0.02)
    train.run(wanted, run=run, lakes=[(tmp_path / "seen", 1.0)])
    labelled, plain = collect_both(tmp_path, str(run), chunk_steps=6)
    label(plain, f"{run}@57")
    label(plain, str(run))
    methods = query(Lake(plain), "select distinct relabel_method from trajectories where base_uid is not null")[1]
    assert sorted(method.rsplit("@")[-1] for (method,) in methods) == ["57/0", "60/0"]
    theirs = read_labels(labelled, "base_uid is null")
    ours = read_labels(plain, "relabel_method like '%@60/0'")
    assert ours.keys() == theirs.keys()
    for key, columns in ours.items():
        np.testing.assert_array_equal(columns[LABEL], theirs[key][LABEL])
    taken = np.concatenate([columns[LABEL][:-1] for columns in ours.values()])
    assert len(np.unique(taken)) > 1


def test_originals_keep_their_schema_and_only_labels_are_stored(tmp_path: Path) -> None:
    collect.run(settings(), lake=tmp_path / "lake")
    lake = Lake(tmp_path / "lake")
    plain = lake.only_schema()
    done = label(tmp_path / "lake", "expert")
    assert done["overlay_bytes"] == 4 * (done["steps"] + done["trajectories"])
    assert label(tmp_path / "lake", "expert")["trajectories"] == 0
    assert lake.only_schema() == plain
    assert lake.only_schema(labels=True) == Schema(plain.spaces, labelled=True)
    counts = query(
        lake, "select count(*), count(label) from steps s join trajectories t using (uid) where base_uid is null"
    )
    assert counts[1][0][0] > 100
    assert counts[1][0][1] == 0


@pytest.mark.system
def test_histories_with_added_labels_make_a_decision_pretrained_transformer(tmp_path: Path) -> None:
    """Windows of histories of versions are as long as those of their originals."""
    env = {**ROOM, "attempts": 1}
    wanted = {"policy": "learner:q-learning", "tasks": 3, "copies": 2, "steps": 840, "actors": "auto"}
    collect.run(tiny(env=env, collect=wanted), lake=tmp_path / "lake")
    label(tmp_path / "lake", "expert")
    histories = "select history, history_index, length from trajectories where base_uid is {} null order by all"
    lake = Lake(tmp_path / "lake")
    assert query(lake, histories.format("")) == query(lake, histories.format("not"))
    recipe = imitating(steps=4, context="history", context_length=30)
    assert train.run(recipe, run=tmp_path / "run", lakes=[(lake.path, 1.0)]).metrics["updates"] == 4


@pytest.mark.system
def test_agents_imitate_labels_that_were_added(tmp_path: Path) -> None:
    """From random play, whose actions agree with the expert's in a fifth of the steps."""
    place = tmp_path / "lake"
    collect.run(settings(), lake=place)
    wanted = imitating(steps=100, batch_size=16, learning_rate=0.02)
    with pytest.raises(InputMissing, match="have no labels"):
        train.run(wanted, run=tmp_path / "run", lakes=[(place, 1.0)])
    label(place, "expert")
    losses = []
    for target in ("label", "action"):
        each = wanted.model_copy(update={"agent": wanted.agent.model_copy(update={"target": target})})
        done = train.run(each, run=tmp_path / f"run-{target}", lakes=[(place, 1.0)])
        losses.append(done.metrics["loss"])
    assert losses[0] < losses[1]


@pytest.mark.system
def test_labels_survive_compaction_and_copying(tmp_path: Path) -> None:
    for seed in (0, 1):
        collect.run(settings(seed=seed), lake=tmp_path / "lake")
    label(tmp_path / "lake", "expert")
    lake = Lake(tmp_path / "lake")
    before = read_labels(lake.path, "base_uid is not null")
    compact(lake, CompactionRules(settle_seconds=0.0), grace_seconds=0.0)
    copied = Lake.create(tmp_path / "copy")
    copy(lake, copied)
    for place in (lake.path, copied.path):
        after = read_labels(place, "base_uid is not null")
        assert after.keys() == before.keys()
        for key, columns in after.items():
            np.testing.assert_array_equal(columns[LABEL], before[key][LABEL])


@pytest.mark.system
def test_collecting_goes_on_without_labels_alone(tmp_path: Path) -> None:
    place = tmp_path / "lake"
    collect.run(settings(), lake=place)
    label(place, "expert")
    with pytest.raises(InputMissing, match="holds steps without labels, not with"):
        collect.run(settings(collect={"label": "expert", "steps": 300}), lake=place)
    collect.run(settings(seed=1), lake=place)
    assert label(place, "expert")["trajectories"] > 0


HISTORIES = {"tasks": 3, "copies": 2, "steps": 840, "actors": "auto"}


@pytest.mark.system
def test_final_labels_are_what_the_whole_history_teaches(tmp_path: Path) -> None:
    """As the textbook's Q-learning, one history at a time."""
    place = tmp_path / "lake"
    for steps in (420, 840):
        wanted = {**HISTORIES, "policy": "learner:q-learning", "steps": steps, "chunk_steps": 5}
        collect.run(tiny(env={**ROOM, "attempts": 1}, collect=wanted), lake=place)
    assert label(place, "final")["trajectories"] == 240  # pieces
    lake = Lake(place)
    taught, reader, untied = learn_from(lake, where="base_uid is null"), Reader(lake), 0
    for uid, history in query(lake, "select uid, history from trajectories where base_uid is not null")[1]:
        columns = reader.read(uid).columns
        for t in range(len(columns["reward"]) - 1):
            best = taught[history].best(tuple(columns["obs"][t].tolist()))
            assert int(columns[LABEL][t]) in best
            untied += len(best) == 1
    assert untied > 100
    methods = "select distinct relabel_method from trajectories where base_uid is not null"
    assert query(lake, methods)[1] == [("label:final@120/0",)]
    assert label(place, "final")["trajectories"] == 0


@pytest.mark.system
def test_final_labels_of_networks_are_their_likeliest_actions(tmp_path: Path) -> None:
    place, chosen = tmp_path / "lake", {"ppo": {"steps": 32, "learning_rate": 0.02}}
    wanted = {**HISTORIES, "policy": "learner:ppo", "learner": chosen}
    collect.run(tiny(env={**ROOM, "attempts": 1}, collect=wanted, seed=5), lake=place)
    label(place, "final")
    lake = Lake(place)
    (collector,) = query(lake, "select distinct collector from trajectories")[1][0]
    learner = make_learner(
        "learner:ppo", lake.only_schema().spaces, LearnerSettings.model_validate(chosen), num_actors=6, seed=5
    )
    replay_histories(lake, collector, learner, 6)
    drawn, labels = [], []
    for uid, history in query(lake, "select uid, history from trajectories where base_uid is not null")[1]:
        columns = Reader(lake).read(uid).columns
        for t in range(len(columns["reward"]) - 1):
            seen = {"obs": np.repeat(columns["obs"][t : t + 1], 6, axis=0)}
            acted = [learner.act(seen, *[np.zeros(6)] * 3)[int(history.split("/")[1])] for _ in range(20)]
            drawn.append(np.bincount(acted, minlength=5))
            labels.append(int(columns[LABEL][t]))
    counts = np.array(drawn)
    assert counts[np.arange(len(labels)), labels].sum() > counts.mean() * len(labels) * 1.2
    assert (counts.sum(0).argmax() == np.array(labels)).mean() < 1


@pytest.mark.parametrize("policy", ["random", POLICY])
def test_final_labels_need_learners(tmp_path: Path, policy: str) -> None:
    collect.run(tiny(env=ROOM, collect={**HISTORIES, "policy": policy}), lake=tmp_path / "lake")
    with pytest.raises(InputMissing, match="not of a history whose learner is recorded"):
        label(tmp_path / "lake", "final")


@pytest.mark.system
@pytest.mark.parametrize("where", ["", '"return" < 2'])
def test_the_summary_of_a_training_counts_what_has_labels(tmp_path: Path, where: str) -> None:
    place = tmp_path / "lake"
    collect.run(tiny(env=ROOM, collect={"steps": 400, "actors": 3, "chunk_steps": 6}), lake=place)
    label(place, "expert", where="seed % 2 = 0")
    metrics = train.run(imitating(steps=1, where=where), run=tmp_path / "run", lakes=[Source(place)]).metrics
    of_episode = """select uids, "return" from episodes where complete and base_uid is null and seed % 2 = 0
        and coalesce(map_extract(tags, 'unfinished')[1], '') != 'true'"""
    found = [value for _, value in query(Lake(place), f"{of_episode} {where and 'and ' + where}")[1]]
    assert 3 < len(found) == metrics["data_episodes"]
    assert metrics["data_return_mean"] == pytest.approx(np.mean(found))


@pytest.mark.system
def test_final_labels_need_all_histories(tmp_path: Path) -> None:
    place = tmp_path / "lake"
    collect.run(tiny(env=ROOM, collect={**HISTORIES, "policy": "learner:q-learning"}), lake=place)
    expire(Lake(place), RetentionLimits(where="history like '%/0/%'"))
    with pytest.raises(InputMissing, match="lacks histories of"):
        label(place, "final")
    expire(Lake(place), RetentionLimits(where="history_index = 0"))
    with pytest.raises(InputMissing, match=r"lacks histories of|have gone from lake"):
        label(place, "final")


def test_episodes_that_are_not_played_again_exactly_are_refused(tmp_path: Path) -> None:
    collect.run(tiny(env={"name": "bandit"}), lake=tmp_path / "lake")
    with pytest.raises(InputMissing, match="played again, it has another 'reward' at step"):
        label(tmp_path / "lake", "expert")
    assert list(Lake(tmp_path / "lake").schemas().values()) == [Lake(tmp_path / "lake").only_schema()]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"relabeler": ("label:expert", "clip:0..1")}, "labels are of trajectories as they were recorded"),
        ({"relabeler": "label:learner:q-learning"}, "cannot be imitated"),
        ({"relabeler": "label:"}, "cannot be imitated"),
        ({"relabeler": "label:nothing"}, "no run or bundle at 'nothing'"),
    ],
)
def test_labels_that_cannot_be_added_are_refused(tmp_path: Path, wanted: dict[str, Any], words: str) -> None:
    collect.run(settings(), lake=tmp_path / "lake")
    with pytest.raises((UsageError, InputMissing), match=words):
        relabel.run(settings(relabel=wanted), lake=tmp_path / "lake")
    assert query(Lake(tmp_path / "lake"), "select count(*) from trajectories where base_uid is not null")[1] == [(0,)]


def test_copies_of_labels_are_refused() -> None:
    with pytest.raises(UsageError) as refused:
        settings(relabel={"relabeler": "label:expert", "copies": 2})
    assert "would all be alike" in str(refused.value.problems)


@pytest.mark.system
def test_windows_are_not_labelled_while_they_are_drawn(tmp_path: Path) -> None:
    collect.run(settings(), lake=tmp_path / "lake")
    wanted = settings(train={"relabel": {"relabeler": ["label:expert"]}})
    with pytest.raises(UsageError, match="is not for windows that are being drawn"):
        train.run(wanted, run=tmp_path / "run", lakes=[(tmp_path / "lake", 1.0)])
