"""lake -> file -> lake: equal trajectories, whatever the format and the spaces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines.config.settings import SourceSettings
from pipelines.errors import InputMissing, IntegrityError
from pipelines.formats.export import export
from pipelines.formats.make import open_importer
from pipelines.lake.reading import Reader
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Spaces
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectory
from tests.lake.factories import IMAGES, INFO, MIXED, RAGGED, SCHEMA, assert_same, columns, fill

pytest.importorskip("h5py")
BOUNDED = Schema(
    Spaces(
        observation={"obs.a": Discrete(n=6, start=3), "obs.b.c": Box(shape=(3,)), "obs.b.d": Box(shape=(2, 2))},
        action=Box(shape=(3,), low=(-2.0, 0.0, -0.1), high=(2.0, 7.5, 0.3)),
    )
)
CHOICES = Schema(Spaces(observation={"obs": Box(shape=(4,))}, action=MultiDiscrete(nvec=(5, 6), start=(1, -2))))
WHOLE = Schema(
    Spaces(
        observation={"obs": Box(shape=(2,))}, action=Box(shape=(2,), low=(0.0, 0.0), high=(9.0, 9.0), native="int64")
    )
)
SCHEMAS = {
    "plain": SCHEMA,
    "images": IMAGES,
    "mixed": MIXED,
    "ragged": RAGGED,
    "bounded": BOUNDED,
    "choices": CHOICES,
}
FORMS = {"npz": "npz", "parquet": "parquet", "hdf5": "d4rl", "minari": "minari"}


def _keep_inside(schema: Schema, values: dict[str, np.ndarray]) -> None:
    """Random columns, with what is outside its space put inside."""
    for name, space in {**schema.spaces.observation, "action": schema.spaces.action}.items():
        if isinstance(space, Discrete):
            values[name] %= space.n
        elif isinstance(space, MultiDiscrete):
            values[name] %= np.array(space.nvec, dtype=values[name].dtype)
        elif isinstance(space, MultiBinary):
            values[name] %= 2
        elif name == "action":
            values[name] = np.clip(values[name], -1, 1)
    if schema.logp:
        values["logp"] = np.minimum(values["logp"], 0)
    if schema.labelled:
        values["label"] = np.roll(values["action"], -1, axis=0)  # within the action's space, and zeros in the last row


def stored(lake: Lake, schema: Schema, lengths: list[int]) -> list[Trajectory]:
    rng, found = np.random.default_rng(0), []
    with lake.writer(schema, seal_seconds=1e9) as writer:
        for number, length in enumerate(lengths):
            values = columns(rng, length, schema)
            _keep_inside(schema, values)
            if number % 2:
                values["terminated"][-1], values["truncated"][-1] = 0, 1
            if number == 2:
                values["truncated"][-1] = 1  # as well as terminated
            values["reset"][1 + number % length] = 1
            history = {"history": "c0/0/left", "history_index": number} if number else {}
            info = replace(INFO, seed=number, tags={"note": f"n{number}"}, **history)
            found.append(Trajectory(values, info, writer.append(values, info)))
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schema", [SCHEMA, BOUNDED, CHOICES], ids=["plain", "bounded", "choices"])
@pytest.mark.parametrize("more", [{"labelled": True}, {"logp": True}, {"labelled": True, "logp": True}])
def test_optional_columns_come_back_from_formats_that_have_them(
    tmp_path: Path, form: str, schema: Schema, more: dict[str, bool]
) -> None:
    lake, wider = Lake.create(tmp_path / "lake"), replace(schema, **more)
    sent = {trajectory.uid: trajectory for trajectory in stored(lake, wider, [3, 1, 5])}
    export(lake, list(sent), tmp_path / "set", form=form, about={})
    source = open_importer(SourceSettings(name=f"{FORMS[form]}:{tmp_path / 'set'}"))
    kept = wider.optional if form in ("npz", "parquet") else []
    assert (source.labelled, source.logp) == ("label" in kept, "logp" in kept)
    back = [trajectory for batch in source.batches() for trajectory in batch]
    source.close()
    assert len(back) == len(sent)
    for each in back:
        before = sent[each.info.tags["from_uid"]].columns
        assert_same(dict(each.columns), {name: before[name] for name in each.columns})
        assert [name for name in each.columns if name in ("label", "logp")] == kept


@pytest.mark.system
@pytest.mark.parametrize("more", ["labelled", "logp"])
def test_files_with_and_without_optional_columns_are_not_mixed(tmp_path: Path, more: str) -> None:
    for number, schema in enumerate((SCHEMA, replace(SCHEMA, **{more: True}))):
        lake = Lake.create(tmp_path / f"lake{number}")
        export(lake, [each.uid for each in stored(lake, schema, [3])], tmp_path / f"all/{number}", form="npz", about={})
    with pytest.raises(InputMissing, match=r"has (labels|logp), unlike the files before it"):
        list(open_importer(SourceSettings(name=f"npz:{tmp_path / 'all'}")).batches())


def test_a_positive_logp_is_refused(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    (one,) = stored(lake, replace(SCHEMA, logp=True), [3])
    export(lake, [one.uid], tmp_path / "set", form="npz", about={})
    path = tmp_path / "set" / f"{one.uid}.npz"
    with np.load(path) as archive:
        values = dict(archive)
    values["logp"][2] = 0.5
    np.savez(path, **values)
    (tmp_path / "set" / "dataset.json").unlink()
    with pytest.raises(IntegrityError, match="'logp' is not the logarithm of a probability"):
        list(open_importer(SourceSettings(name=f"npz:{tmp_path / 'set'}")).batches())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_what_comes_back_is_what_went_out(tmp_path: Path, form: str, name: str) -> None:
    schema, lake = SCHEMAS[name], Lake.create(tmp_path / "lake")
    sent = {trajectory.uid: trajectory for trajectory in stored(lake, schema, [3, 1, 5, 12])}
    to = tmp_path / "set"
    done = export(lake, list(sent), to, form=form, about={"lake": "x", "where": ""})
    assert (done.trajectories, done.steps, done.written) == (4, 21, 4)
    source = open_importer(SourceSettings(name=f"{FORMS[form]}:{to}"))
    assert source.spaces == schema.spaces
    other = Lake.create(tmp_path / "other")
    with other.writer(schema, seal_seconds=1e9) as writer:
        uids = [uid for batch in source.batches() for uid in writer.append_many(batch)]
    source.close()
    reader = Reader(other)
    assert len(uids) == 4
    for uid in uids:
        back = reader.read(uid)
        before = sent[back.info.tags["from_uid"]]
        assert_same(dict(back.columns), dict(before.columns))
        tags = {key: value for key, value in back.info.tags.items() if key in before.info.tags}
        assert replace(back.info, tags=tags, source="rollout", collector="c0") == before.info


@pytest.mark.parametrize("form", ["hdf5", "minari"])
def test_a_file_for_several_spaces_is_refused(tmp_path: Path, form: str) -> None:
    lake = Lake.create(tmp_path / "lake")
    uids = [*fill(lake, [3]), *fill(lake, [4], schema=MIXED)]
    with pytest.raises(InputMissing, match="different spaces"):
        export(lake, uids, tmp_path / "set", form=form, about={})
    assert not list((tmp_path / "set").rglob("*.hdf5"))
    assert export(lake, uids[:1], tmp_path / "set", form=form, about={}).trajectories == 1


def test_hdf5_is_laid_out_as_d4rl_has_it(tmp_path: Path) -> None:
    import h5py

    lake = Lake.create(tmp_path / "lake")
    first, second = stored(lake, BOUNDED, [3, 2])[:2]
    export(lake, [first.uid, second.uid], tmp_path / "set", form="hdf5", about={})
    low, high = np.array([-2.0, 0.0, -0.1]), np.array([2.0, 7.5, 0.3])
    with h5py.File(tmp_path / "set" / "dataset.hdf5") as file:
        assert file["timeouts"][()].tolist() == [False, False, False, False, True]
        assert file["terminals"][()].tolist() == [False, False, True, False, False]
        inside = np.concatenate([first.columns["action"][1:], second.columns["action"][1:]])
        np.testing.assert_allclose(file["actions"], low + (inside.astype(float) + 1) / 2 * (high - low), atol=1e-12)
        np.testing.assert_array_equal(file["observations/b/c"][3:], second.columns["obs.b.c"][:-1])
        np.testing.assert_array_equal(file["next_observations/b/c"][:3], first.columns["obs.b.c"][1:])
        np.testing.assert_array_equal(file["observations/a"][:3], first.columns["obs.a"][:-1] + 3)


@pytest.mark.parametrize("schema", [SCHEMA, IMAGES, BOUNDED, CHOICES, WHOLE], ids=lambda schema: schema.id)
def test_minari_reads_what_is_written_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: Schema) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    lake = Lake.create(tmp_path / "lake")
    sent = stored(lake, schema, [3, 40])
    export(lake, [trajectory.uid for trajectory in sent], tmp_path / "mine-v1", form="minari", about={})
    dataset = minari.load_dataset("mine-v1")
    assert (dataset.total_episodes, dataset.total_steps) == (2, 43)
    for episode, trajectory in zip(dataset.iterate_episodes(), sent, strict=True):
        assert len(episode) == trajectory.length
        np.testing.assert_array_equal(episode.rewards, trajectory.columns["reward"][1:])
        assert (episode.terminations[-1], episode.truncations[-1]) == (
            bool(trajectory.columns["terminated"][-1]),
            bool(trajectory.columns["truncated"][-1]),
        )
        if list(schema.spaces.observation) == ["obs"]:
            np.testing.assert_array_equal(episode.observations, trajectory.columns["obs"])
            assert dataset.observation_space.contains(episode.observations[0])
        else:
            assert episode.observations.keys() == {name.split(".")[1] for name in schema.spaces.observation}
        assert dataset.action_space.contains(episode.actions[0].astype(dataset.action_space.dtype))
