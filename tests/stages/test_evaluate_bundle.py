"""A bundle is evaluated, and collects, as the checkpoint that it was made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.settings import CollectSettings, Settings
from pipelines.errors import InputMissing, IntegrityError, RequirementNotMet, UsageError
from pipelines.files.checksums import read_sealed, seal
from pipelines.lake import collectors
from pipelines.lake.store import Lake
from pipelines.rollout.plan import describe_behaviour
from pipelines.stages import collect, evaluate, export, library
from tests.stages.recipes import tiny
from tests.tiers import some


@pytest.fixture(scope="module")
def run(_prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(_prepared, tmp_path_factory.mktemp("bundle") / "run", symlinks=True))


@pytest.fixture(scope="module")
def made(run: Path) -> Path:
    return Path(export.run(tiny(), run=run).outputs[0])


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "policy"))


def changed(bundle: Path, **changes: Any) -> Path:
    """Change policy.json, with the checksums that its author would give it."""
    record = read_sealed(bundle / "policy.json")
    files = {name: (bundle / name).read_bytes() for name in record["files"]}
    (bundle / "policy.json").write_bytes(seal(record | changes, files))
    return bundle


def figures(metrics: Any) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if "seconds" not in key}


@pytest.mark.system
@pytest.mark.parametrize("tables", some([{}, {"greedy": False}, {"evaluators": 2, "actors": 4}], 0, 1))
def test_a_bundle_scores_what_its_checkpoint_scores(run: Path, bundle: Path, tables: dict) -> None:
    settings = tiny(evaluate=tables, collect={"workers": 0})
    files = {path.name: path.read_bytes() for path in bundle.iterdir()}
    of_run, of_bundle = evaluate.run(settings, run=run), evaluate.run_bundle(settings, directory=bundle)
    assert figures(of_bundle.metrics) == figures(of_run.metrics)
    assert (of_bundle.status, of_bundle.run, list(of_bundle.outputs)) == ("done", None, [])
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == files


@pytest.mark.system
def test_a_result_is_written_where_the_user_says_and_read_back(bundle: Path, tmp_path: Path) -> None:
    settings, to = tiny(evaluate={"video": 1}), tmp_path / "scores"
    first = evaluate.run_bundle(settings, directory=bundle, to=to)
    report, video = first.outputs
    assert json.loads(report.read_text())["metrics"]["return_mean"] == first.metrics["return_mean"]
    assert video.stat().st_size
    assert evaluate.run_bundle(settings, directory=bundle, to=to).status == "skipped"
    other = changed(bundle, update=7)
    assert evaluate.run_bundle(settings, directory=other, to=to).status == "done"


def test_a_gate_applies(bundle: Path) -> None:
    with pytest.raises(RequirementNotMet) as refused:
        evaluate.run_bundle(tiny(evaluate={"require": "return_mean > 1e6"}), directory=bundle)
    assert refused.value.result.metrics["episodes"] == 6


@pytest.mark.parametrize(
    ("tables", "to", "form", "words"),
    [
        ({"evaluate": {"checkpoint": "best"}}, None, "weights", "has one policy"),
        ({"evaluate": {"tasks": "success"}}, None, "weights", "no lakes"),
        ({"evaluate": {"mark_best": True}}, None, "weights", "no checkpoints"),
        ({"track": {"to": ["tensorboard"]}}, None, "weights", "trackers"),
        ({"evaluate": {"video": 1}}, None, "weights", "--to DIR"),
        ({"evaluate": {"video": 1}}, "x", "onnx", "not another form"),
        ({}, "policy/scores", "weights", "sealed"),
    ],
)
def test_what_only_a_run_has_is_refused(
    bundle: Path, tmp_path: Path, tables: dict, to: str | None, form: str, words: str
) -> None:
    with pytest.raises(UsageError) as refused:
        evaluate.run_bundle(tiny(**tables), directory=bundle, to=tmp_path / to if to else None, form=form)
    assert words in " ".join(refused.value.problems)


def test_a_form_that_is_absent_is_named(bundle: Path) -> None:
    with pytest.raises(InputMissing, match="no form 'onnx'"):
        evaluate.run_bundle(tiny(), directory=bundle, form="onnx")


def test_other_spaces_are_refused(bundle: Path) -> None:
    with pytest.raises(InputMissing, match="trained for other spaces"):
        evaluate.run_bundle(tiny(env={"name": "gym:CartPole-v1"}), directory=bundle)


@pytest.mark.parametrize("name", ["weights.safetensors", "policy.json", "policy.py"])
def test_damage_is_refused_before_anything_acts(bundle: Path, name: str, tmp_path: Path) -> None:
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)
    with pytest.raises(IntegrityError, match=name):
        evaluate.run_bundle(tiny(), directory=bundle)
    with pytest.raises(IntegrityError, match=name):
        collect.run(tiny(collect={"policy": str(bundle)}), lake=tmp_path / "lake")
    assert not (tmp_path / "lake" / "lake.json").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"spaces": {}},
        {"spaces": {"observation": [], "action": 3}},
        {"agent": {"kind": "actor-critic", "gammas": "x"}},
        {"agent": {}},
        {"context_length": 0},
        {"env": 3},
        {"update": "x"},
        {"version": "1"},
    ],
)
def test_a_malformed_bundle_is_damaged_not_a_traceback(bundle: Path, changes: dict) -> None:
    with pytest.raises((IntegrityError, UsageError)):
        evaluate.run_bundle(tiny(), directory=changed(bundle, **changes))


def test_the_files_of_a_bundle_lie_in_it(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"x")
    record = read_sealed(bundle / "policy.json")
    names = [*record["files"], "../outside"]
    (bundle / "policy.json").write_bytes(seal(record, {name: (bundle / name).read_bytes() for name in names}))
    with pytest.raises(IntegrityError, match="outside its directory"):
        evaluate.run_bundle(tiny(), directory=bundle)


@pytest.mark.system
def test_a_library_imports_no_environment_that_a_bundle_names(bundle: Path, tmp_path: Path) -> None:
    assert library.evaluate(bundle, episodes=2).metrics["episodes"] == 2
    foreign = changed(bundle, env={"name": "tests.envs.own:Told"})
    with pytest.raises(InputMissing, match="would import the module"):
        library.evaluate(foreign, episodes=2)
    with pytest.raises(InputMissing, match="trained for other spaces"):  # it was imported
        library.evaluate(foreign, episodes=2, trust=True)
    assert library.evaluate(foreign, env="tmaze", settings={"env.corridor": 4}, episodes=2).metrics["episodes"] == 2


@pytest.mark.system
def test_a_bundle_collects_as_a_collector_of_its_own(bundle: Path, run: Path, tmp_path: Path) -> None:
    """Which counts its steps wherever the bundle is."""
    lake, moved = tmp_path / "lake", tmp_path / "moved"
    first = collect.run(tiny(collect={"policy": str(bundle)}), lake=lake)
    shutil.move(bundle, moved)
    again = collect.run(tiny(collect={"policy": str(moved)}), lake=lake)
    assert (first.status, again.status) == ("done", "skipped")
    assert again.metrics["collector"] == first.metrics["collector"]
    [record] = collectors.read_all(Lake(lake)).values()
    [rows] = Lake(lake).sql("select distinct policy_id, policy_version from trajectories")
    assert rows == {"policy_id": first.metrics["policy"], "policy_version": 6}
    checksum = record["behaviour"]["policy"].removeprefix("bundle:")
    assert (len(checksum), first.metrics["policy"]) == (64, f"bundle-{checksum[:12]}")
    of_run = collect.run(tiny(collect={"policy": str(run)}), lake=lake)
    assert of_run.metrics["collector"] != first.metrics["collector"]
    assert of_run.metrics["return_mean"] == first.metrics["return_mean"]  # the same policy and seeds
    other = describe_behaviour(Settings(collect=CollectSettings(policy=str(changed(moved, update=7)))))
    assert other["policy"] != record["behaviour"]["policy"]
