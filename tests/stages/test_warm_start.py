"""Warm starts: a run that begins with the weights of another policy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.config import amago_weights
from pipelines.config.load import fold, resolve
from pipelines.config.policy_files import list_checkpoints
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.errors import InputMissing, UsageError
from pipelines.events import Event, Listener, Notice, silent
from pipelines.files.checksums import seal
from pipelines.lake.lineage import trace
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.lake.store import Lake
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.popart import PopArt
from pipelines.rollout.environment import find_env_model
from pipelines.runs.summary import summarize_runs
from pipelines.stages import collect, export
from pipelines.stages import library as stages
from pipelines.stages import run as chain
from pipelines.training.trainer import Trainer
from tests.learning.amago.cases import GOLDEN, draw_weights
from tests.stages.recipes import TINY, tiny


def weights(run: Path, which: str = "latest") -> dict[str, torch.Tensor]:
    return checkpoints.load(run / "checkpoints", which).acting


def start(trained: Path, run: Path, listener: Listener = silent, **given: object) -> Path:
    """Write the first checkpoint of `run`, before any update; `given` are settings by dotted key."""
    assignments = [(key.split("."), value) for key, value in given.items()]
    settings = resolve({}, assignments, env_model=find_env_model, stored=RunDirectory(trained).load_document())
    spaces = Lake(trained / "lake").only_schema().spaces
    Trainer(settings, RunDirectory(run), spaces, listener=listener).save()
    return run


def test_run_begins_with_all_weights_and_statistics_of_the_source(trained: Path, tmp_path: Path) -> None:
    before, after = weights(trained), weights(start(trained, tmp_path / "new", **{"init.source": str(trained)}))
    assert before.keys() == after.keys()
    for name, value in before.items():
        if not name.startswith("target_heads."):
            torch.testing.assert_close(after[name], value, rtol=0, atol=0, msg=name)
    for name, value in after.items():
        if name.startswith("target_heads."):
            torch.testing.assert_close(value, after[name.removeprefix("target_")], rtol=0, atol=0, msg=name)


def test_run_has_the_network_of_the_source_whatever_the_lake_was_collected_for(trained: Path, tmp_path: Path) -> None:
    other = tiny(agent={"sequence": {"d_model": 24}})
    collect.run(other, run=tmp_path / "other")
    run = tmp_path / "new"
    stages.train(tmp_path / "other", run=run, steps=1, settings={"init.source": str(trained)})
    assert RunDirectory(run).load_document()["agent"] == RunDirectory(trained).load_document()["agent"]


@pytest.mark.system
def test_checkpoint_is_pinned_and_a_repeated_command_resumes(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "new"
    stages.train(trained, run=run, steps=1, settings={"init.source": str(trained)})
    assert RunDirectory(run).load_document()["init"]["source"] == f"{trained}@6"
    stages.train(trained, steps=8)  # the source goes on
    result = stages.train(trained, run=run, steps=2, settings={"init.source": str(trained)})
    assert (result.status, result.metrics["updates"]) == ("done", 2)
    assert stages.train(trained, run=run, steps=3).metrics["updates"] == 3
    with pytest.raises(UsageError, match="did not begin with"):
        stages.train(trained, run=run, steps=4, settings={"init.source": f"{trained}@8"})


def test_a_run_that_has_begun_otherwise_is_refused(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "new"
    stages.train(trained, run=run, steps=1)
    before = weights(run)
    with pytest.raises(UsageError, match="has been trained already"):
        stages.train(trained, run=run, steps=2, settings={"init.source": str(trained)})
    torch.testing.assert_close(weights(run), before, rtol=0, atol=0)


def test_bundle_is_a_source_without_target_heads(trained: Path, tmp_path: Path) -> None:
    document = RunDirectory(trained).load_document() | {"export": {"to": str(tmp_path / "bundle")}}
    export.run(Settings.model_validate(document), run=trained)
    run = start(trained, tmp_path / "new", **{"init.source": str(tmp_path / "bundle")})
    for name, value in weights(trained).items():
        if not name.startswith(("target_heads.", "advantage_scale.")):
            torch.testing.assert_close(weights(run)[name], value, rtol=0, atol=0, msg=name)


def test_parts_that_are_not_taken_stay_random(trained: Path, tmp_path: Path) -> None:
    parts = ["timestep", "sequence", "actor"]
    run = start(trained, tmp_path / "new", **{"init.source": str(trained), "init.parts": parts})
    plain = start(trained, tmp_path / "plain")
    taken, random, source = weights(run), weights(plain), weights(trained)
    for name, value in taken.items():
        if name.startswith("target_heads."):
            continue
        is_critic = name.startswith(("popart.", "advantage_scale.", "heads.")) and not name.startswith("heads.actor.")
        torch.testing.assert_close(value, (random if is_critic else source)[name], rtol=0, atol=0, msg=name)
    assert taken["popart.updates"] == PopArt((0.9,), tiny().agent.popart).updates


def test_another_network_is_refused_with_every_shape_or_begins_at_random(trained: Path, tmp_path: Path) -> None:
    wide = {"init.source": str(trained), "agent.actor.hidden": [24]}
    with pytest.raises(UsageError, match="the network differs") as raised:
        stages.train(trained, run=tmp_path / "new", steps=1, settings=wide)
    assert any("heads.actor.net" in line and "here" in line for line in raised.value.problems)
    assert not (tmp_path / "new" / "checkpoints").exists()
    heard: list[Event] = []
    run = start(trained, tmp_path / "fits", heard.append, **wide, **{"init.strict": False})
    assert sum("begins at random" in event.text for event in heard if isinstance(event, Notice)) >= 2
    name = next(name for name in weights(run) if name.startswith("sequence."))
    torch.testing.assert_close(weights(run)[name], weights(trained)[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [("{}/nothing", InputMissing, "no run or policy bundle"), ("{}@99", InputMissing, "no checkpoint 99"),
     ("zoo:nothing", InputMissing, "in the zoo"), ("amago:{}/no.pt", InputMissing, "no weights of AMAGO"),
     ("amago:{}/config.toml", InputMissing, "not a state dict")],
)  # fmt: skip
def test_missing_source_is_one_line_and_nothing_is_written(
    trained: Path, tmp_path: Path, source: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        stages.train(trained, run=tmp_path / "new", steps=1, settings={"init.source": source.format(trained)})
    assert not (tmp_path / "new").exists()


def test_modules_that_a_source_names_are_not_imported(trained: Path) -> None:
    path = trained / "checkpoints" / "000006" / "checkpoint.json"
    record = json.loads(path.read_bytes())
    record["agent"]["sequence"] = {"kind": "evil:Encoder"}
    path.write_bytes(seal({key: value for key, value in record.items() if key not in ("files", "checksum")}, {}))
    with pytest.raises(InputMissing, match="would import the module 'evil'"):
        fold({}, [(("init", "source"), str(trained))])


def test_parent_is_shown_by_runs_and_lineage(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "new"
    stages.train(trained, run=run, steps=1, settings={"init.source": str(trained)})
    parent = f"{RunDirectory(trained).identity}@6"
    assert summarize_runs([run])[0]["parent"] == parent
    assert trace(run).weights_from == parent


def test_chain_acts_with_the_weights_from_its_first_step(trained: Path, tmp_path: Path) -> None:
    document = RunDirectory(trained).load_document()
    document["stages"] = [{"stage": "collect"}, {"stage": "train"}]
    document["collect"]["steps"], document["train"]["steps"] = 100, 1
    settings = resolve(document, [(("init", "source"), str(trained))], env_model=find_env_model)
    chain.run(settings, run=tmp_path / "chain")
    assert RunDirectory(tmp_path / "chain").weights_from == f"{RunDirectory(trained).identity}@6"
    assert list_checkpoints(tmp_path / "chain" / "checkpoints") == [1]


@pytest.mark.system
def test_averaged_weights_of_the_source_begin_both_weights_and_average(trained: Path, tmp_path: Path) -> None:
    averaged = tmp_path / "averaged"
    stages.train(trained, run=averaged, steps=4, settings={"train.ema_decay": 0.9})
    run = start(trained, tmp_path / "new", **{"init.source": str(averaged), "train.ema_decay": 0.9})
    new, old = checkpoints.load(run / "checkpoints"), checkpoints.load(averaged / "checkpoints")
    assert new.average
    for name, mean in new.average.items():
        torch.testing.assert_close(mean, old.average[name], rtol=0, atol=0)
        torch.testing.assert_close(new.weights[name], mean, rtol=0, atol=0)


def write_amago(folder: Path, spaces: Spaces) -> Path:
    """Write weights as AMAGO does, of an agent for these spaces."""
    with np.load(GOLDEN / "gru.npz") as golden:
        shapes, config = json.loads(str(golden["shapes"])), str(golden["config"])
    choices = spaces.action.flat_size
    inputs = sum(math.prod(space.shape) for space in spaces.observation.values()) + 1 + choices
    for name, shape in shapes.items():
        if name.startswith(("tstep_encoder.in_norm.m", "tstep_encoder.in_norm.n", "tstep_encoder.base.in_layer.w")):
            shape[-1] = inputs
        elif name.startswith("actor.base.out_layer"):
            shape[0] = 7 * choices
        elif name.startswith("critics.net.output_layer"):
            shape[-1] = 7 * choices
    path = folder / "ckpts" / "policy_weights" / "policy_epoch_40.pt"
    path.parent.mkdir(parents=True)
    drawn = draw_weights(shapes)
    for name in ("weight", "bias"):
        drawn[f"actor.base.out_layer.{name}"] /= 12  # a policy that is not sure, so that scores vary
    torch.save({name: torch.from_numpy(value) for name, value in drawn.items()}, path)
    (folder / "ckpts" / "config.txt").write_text(config)
    return path


@pytest.mark.system
def test_weights_of_amago_begin_a_run_with_their_network_and_are_its_parent(trained: Path, tmp_path: Path) -> None:
    path = write_amago(tmp_path, Lake(trained / "lake").only_schema().spaces)
    source, run = f"amago:{path}", tmp_path / "new"
    stages.train(trained, run=run, steps=1, settings={"init.source": source})
    document = RunDirectory(run).load_document()
    assert (document["init"]["source"], document["agent"]["sequence"]["kind"]) == (source, "gru")
    parent = amago_weights.read(source).identity + "@40"
    assert (summarize_runs([run])[0]["parent"], trace(run).weights_from) == (parent, parent)
    path.unlink()  # a run that has begun needs it no more
    assert stages.train(trained, run=run, steps=2, settings={"init.source": source}).metrics["updates"] == 2


def test_weights_of_amago_play(trained: Path, tmp_path: Path) -> None:
    path = write_amago(tmp_path, Lake(trained / "lake").only_schema().spaces)
    collect.run(tiny(collect={"policy": f"amago:{path}"}), run=tmp_path / "played")
    rows = Lake(tmp_path / "played" / "lake").sql("select distinct policy_id, policy_version from trajectories")
    assert [*map(dict, rows)] == [{"policy_id": amago_weights.read(f"amago:{path}").identity, "policy_version": 40}]


def test_weights_of_amago_for_other_spaces_are_refused_with_every_shape(trained: Path, tmp_path: Path) -> None:
    other = Spaces(observation={"obs": Box(shape=(2,))}, action=Discrete(n=9))
    path = write_amago(tmp_path, other)
    with pytest.raises(UsageError, match="the network differs") as raised:
        stages.train(trained, run=tmp_path / "new", steps=1, settings={"init.source": f"amago:{path}"})
    named = "".join(raised.value.problems)
    assert all(
        name in named for name in ("timestep.norm.mean", "heads.actor.net.last.weight", "heads.critic.last_bias")
    )
    assert not (tmp_path / "new" / "checkpoints").exists()


@pytest.mark.system
def test_weights_of_amago_score_as_a_run_that_begins_with_them(tmp_path: Path) -> None:
    settings = resolve({**TINY, "env": {"name": "gym:CartPole-v1"}}, env_model=find_env_model)
    played = tmp_path / "played"
    collect.run(settings, run=played)
    path = write_amago(tmp_path, Lake(played / "lake").only_schema().spaces)
    source, wanted = f"amago:{path}", {"evaluate.actors": 3, "evaluate.greedy": False}
    run = start(played, tmp_path / "new", **{"init.source": source})
    RunDirectory(run).record("train", settings)
    own = stages.evaluate(run, episodes=6, settings=wanted).metrics
    found = stages.evaluate(source, env="gym:CartPole-v1", episodes=6, settings=wanted).metrics
    assert {**found, "update": 0} == own
    assert own["return_std"] > 0
    with pytest.raises(UsageError, match="--env NAME"):
        stages.evaluate(source)
