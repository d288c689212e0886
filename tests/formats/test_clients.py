"""Exported datasets and answers of SQL, read by the packages that others use; and their datasets, read by us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from pipelines.config.settings import SourceSettings
from pipelines.formats.make import open_importer
from pipelines.lake.reading import trajectories
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectory
from pipelines.stages import collect, export
from tests.cli.conftest import call
from tests.stages.recipes import tiny

pytest.importorskip("h5py")
ENVS = {"CartPole-v1": {}, "Pendulum-v1": {"g": 9.0, "max_episode_steps": 40}}


@pytest.fixture(scope="module", params=ENVS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Episodes of an environment of gymnasium, half of them by worker processes. Tests only read them."""
    place = tmp_path_factory.mktemp("clients") / "lake"
    for number, workers in enumerate((0, 1)):
        env = {"name": f"gym:{name}", **ENVS[name]}
        settings = tiny(env=env, seed=number, collect={"steps": 160, "actors": 2, "workers": workers})
        collect.run(settings, lake=place)
    return place


def exported(lake: Path, to: Path, form: str, **said: str) -> list[Trajectory]:
    """The trajectories in the order of the export."""
    export.dataset(tiny(export={"to": str(to), "format": form, **said}).export, lake=lake)
    return list(trajectories(Lake(lake)))


@pytest.mark.system
def test_flat_flags_are_exclusive_and_all_ends_are_kept(tmp_path: Path, lake: Path) -> None:
    import h5py

    sent = exported(lake, tmp_path / "set", "hdf5")
    with h5py.File(tmp_path / "set" / "dataset.hdf5") as file:
        terminals, timeouts = file["terminals"][()], file["timeouts"][()]
    assert not (terminals & timeouts).any()
    assert (terminals | timeouts).sum() == len(sent)
    assert terminals.sum() == sum(int(each.columns["terminated"][-1]) for each in sent)


def test_croissant_describes_every_step(tmp_path: Path, lake: Path) -> None:
    """The reference implementation finds no error, and reads by the description what the lake holds."""
    mlcroissant = pytest.importorskip("mlcroissant")
    sent = exported(lake, tmp_path / "set", "parquet", author="A. Nobody")
    dataset = mlcroissant.Dataset(jsonld=tmp_path / "set/croissant.json")
    assert not dataset.metadata.ctx.issues.errors
    rows = list(dataset.records("steps"))
    assert len(rows) == sum(each.length + 1 for each in sent)
    for name in ("obs", "reward", "terminated"):
        found = np.array([row[f"steps/{name}"] for row in rows])
        np.testing.assert_array_equal(found, np.concatenate([each.columns[name] for each in sent]))
    uids = {row["trajectories/uid"].decode() for row in dataset.records("trajectories")}
    assert uids == {row["steps/uid"].decode() for row in rows}


def queried(lake: Path, to: Path, text: str) -> list[dict[str, Any]]:
    """Write an answer to `to` by its ending; return the same rows as JSON has them."""
    written = call("lake", "sql", lake, text, "--output", to.suffix[1:], "--to", to)
    assert written.code == 0, written.err
    rows: list[dict[str, Any]] = call("lake", "sql", lake, text, "--output", "json").json
    assert rows
    return rows


TABLES = ["from trajectories order by uid", "from steps order by uid, t", "from episodes order by episode"]
COUNTS = "select task, sum(length) as steps, map {'mean': avg(\"return\")} as scores from trajectories group by task"


@pytest.mark.parametrize("text", [*TABLES, COUNTS])
def test_polars_reads_answers(tmp_path: Path, lake: Path, text: str) -> None:
    polars = pytest.importorskip("polars")
    for name, read in (("rows.parquet", polars.read_parquet), ("rows.arrow", polars.read_ipc)):
        assert queried(lake, tmp_path / name, text) == read(tmp_path / name).to_dicts()
    assert queried(lake, tmp_path / name, text) == Lake(lake).to_polars(text).to_dicts()


@pytest.mark.parametrize("text", [*TABLES, COUNTS])
def test_pandas_reads_answers(tmp_path: Path, lake: Path, text: str) -> None:
    pandas = pytest.importorskip("pandas")
    for name, read in (("rows.parquet", pandas.read_parquet), ("rows.arrow", pandas.read_feather)):
        rows = queried(lake, tmp_path / name, text)
        frame = read(tmp_path / name)
        assert list(frame.columns) == list(rows[0])
        for column in frame.columns:
            for found, row in zip(frame[column], rows, strict=True):
                if isinstance(expected := row[column], dict):  # of a map, pandas makes pairs
                    assert dict(found) == expected
                elif isinstance(expected, list):
                    np.testing.assert_array_equal(found, np.array(expected))
                else:
                    assert (pandas.isna(found) and expected is None) or found == expected


@pytest.mark.parametrize("text", ["select * exclude (tags) from trajectories order by uid", TABLES[1]])
def test_hugging_face_datasets_read_answers(tmp_path: Path, lake: Path, text: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = queried(lake, tmp_path / "rows.parquet", text)
    found = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "cache"))
    assert found.to_list() == rows


def replayed(env: gymnasium.Env, seed: int, actions: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """What an environment shows and pays after a reset with `seed`, over some actions."""
    observation, _ = env.reset(seed=seed)
    seen, paid = [observation], []
    for action in actions:
        given = action.astype(env.action_space.dtype) if action.ndim else int(action)
        observation, reward, *_ = env.step(given)
        seen.append(observation)
        paid.append(float(reward))
    return np.array(seen), paid


def test_minari_recovers_the_environment_and_every_episode_can_be_played_again(
    tmp_path: Path, lake: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    sent = exported(lake, tmp_path / "mine-v1", "minari", author="Ada, Grace", description="by hand")
    dataset = minari.load_dataset("mine-v1")
    env: Any = dataset.recover_environment()
    assert dataset.observation_space == env.observation_space  # with its bounds
    metadata = dataset.storage.metadata
    assert (metadata["author"], metadata["description"]) == ({"Ada", "Grace"}, "by hand")
    seeds = [each["seed"] for each in dataset.storage.get_episode_metadata(range(dataset.total_episodes))]
    assert len(set(seeds)) == len(seeds) == len(sent)
    for seed, episode in zip(seeds, dataset.iterate_episodes(), strict=True):
        assert all(dataset.observation_space.contains(each) for each in episode.observations)
        seen, paid = replayed(env, seed, episode.actions)
        np.testing.assert_allclose(episode.observations, seen, atol=1e-4)
        np.testing.assert_allclose(episode.rewards, paid, atol=1e-4)
    if name.startswith("Pendulum"):
        assert env.unwrapped.g == 9.0
        assert env.spec.max_episode_steps == 40


def test_d3rlpy_takes_a_minari_dataset(tmp_path: Path, lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("minari")
    d3rlpy = pytest.importorskip("d3rlpy")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    sent = exported(lake, tmp_path / "mine-v1", "minari")
    buffer, env = d3rlpy.datasets.get_minari("mine-v1")
    assert env.observation_space.shape == sent[0].columns["obs"].shape[1:]
    assert_is_buffer(buffer, sent)


@pytest.mark.parametrize("discrete", [False, True])
def test_replay_buffers_that_d3rlpy_dumped_are_read(tmp_path: Path, discrete: bool) -> None:
    d3rlpy = pytest.importorskip("d3rlpy")
    rng = np.random.default_rng(0)
    sent = []
    for length in (2, 9, 3, 30, 4, 5, 6, 7, 8, 2, 2, 2):
        actions = rng.integers(0, 4, (length, 1)) if discrete else rng.uniform(-1, 1, (length, 2)).astype(np.float32)
        rewards = rng.normal(size=(length, 1)).astype(np.float32)
        seen = rng.normal(size=(length, 3)).astype(np.float32)
        sent.append(d3rlpy.dataset.Episode(seen, actions, rewards, bool(length % 2)))
    with (tmp_path / "buffer.h5").open("w+b") as file:
        d3rlpy.dataset.create_infinite_replay_buffer(episodes=sent).dump(file)
    source = open_importer(SourceSettings(name=str(tmp_path / "buffer.h5")))
    found = [trajectory for batch in source.batches() for trajectory in batch]
    source.close()
    assert len(found) == len(sent)
    for episode, trajectory in zip(sent, found, strict=True):
        steps = episode.transition_count
        np.testing.assert_array_equal(trajectory.columns["obs"][:steps], episode.observations[:steps])
        np.testing.assert_array_equal(trajectory.columns["action"][1:].reshape(steps, -1), episode.actions[:steps])
        np.testing.assert_array_equal(trajectory.columns["reward"][1:], episode.rewards[:steps, 0])
        assert bool(trajectory.columns["terminated"][-1]) == episode.terminated


def test_d3rlpy_takes_flat_arrays(tmp_path: Path, lake: Path) -> None:
    import h5py

    d3rlpy = pytest.importorskip("d3rlpy")
    sent = exported(lake, tmp_path / "set", "hdf5")
    with h5py.File(tmp_path / "set" / "dataset.hdf5") as file:
        names = ("observations", "actions", "rewards", "terminals", "timeouts")
        arrays = {name: file[name][()] for name in names}
    buffer = d3rlpy.dataset.MDPDataset(**arrays)
    assert_is_buffer(buffer, sent)
    for episode, trajectory in zip(buffer.episodes, sent, strict=True):
        np.testing.assert_array_equal(episode.observations, trajectory.columns["obs"][:-1])


def assert_is_buffer(buffer: Any, sent: list[Trajectory]) -> None:
    """Observations are not compared here: `get_minari` of d3rlpy 2.8 forgets that Minari has T + 1 of them."""
    assert len(buffer.episodes) == len(sent)
    for episode, trajectory in zip(buffer.episodes, sent, strict=True):
        np.testing.assert_array_equal(episode.rewards[:, 0], trajectory.columns["reward"][1:])
        assert episode.terminated == bool(trajectory.columns["terminated"][-1])


@pytest.mark.parametrize("keep_timeouts", [False, True])
def test_d4rls_own_rule_keeps_every_terminal_step(tmp_path: Path, lake: Path, keep_timeouts: bool) -> None:
    """D4RL's `qlearning_dataset`: a step that is a timeout has no next observation, unless the file has one."""
    import h5py

    sent = exported(lake, tmp_path / "set", "hdf5")
    with h5py.File(tmp_path / "set" / "dataset.hdf5") as file:
        arrays = {name: values[()] for name, values in file.items() if isinstance(values, h5py.Dataset)}
    kept = np.ones(len(arrays["rewards"]), dtype=bool) if keep_timeouts else ~arrays["timeouts"].astype(bool)
    assert arrays["terminals"][kept].sum() == sum(int(each.columns["terminated"][-1]) for each in sent)
    after = np.concatenate([each.columns["obs"][1:] for each in sent])
    np.testing.assert_array_equal(arrays["next_observations"][kept], after[kept])
