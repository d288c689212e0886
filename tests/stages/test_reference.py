"""Training near a frozen policy: exact resume, the record of which one it was, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.lineage import trace
from pipelines.learning import checkpoint as checkpoints
from pipelines.report.lineage_tree import Node
from pipelines.stages import collect, train
from pipelines.stages import library as stages
from tests.stages.recipes import tiny


def near(reference: object, **table: object) -> Settings:
    return tiny(agent={"reference": str(reference), **table})


def weights(run: Path, which: str = "latest") -> dict[str, torch.Tensor]:
    return dict(checkpoints.load(run / "checkpoints", which).weights)


@pytest.mark.system
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(trained: Path, tmp_path: Path) -> None:
    settings = near(trained, reference_weight=3.0)
    lakes = [(trained / "lake", 1.0)]
    train.run(settings, run=tmp_path / "whole", lakes=lakes)
    some = settings.model_copy(update={"train": settings.train.model_copy(update={"steps": 3})})
    train.run(some, run=tmp_path / "parts", lakes=lakes)
    train.run(settings, run=tmp_path / "parts", lakes=lakes)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys() == weights(trained).keys()
    for name, value in whole.items():
        torch.testing.assert_close(value, parts[name], rtol=0, atol=0, msg=name)


@pytest.mark.system
def test_the_checkpoint_is_recorded_and_named_in_the_lineage(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "held"
    stages.train(trained, run=run, steps=2, settings={"agent.reference": str(trained)})
    assert any("reference_loss" in line for line in (run / "metrics.jsonl").read_text().splitlines())
    update = checkpoints.load(trained / "checkpoints").update
    assert RunDirectory(run).load_document()["agent"]["reference"] == f"{trained}@{update}"
    origin = trace(run)
    assert origin.reference == f"{RunDirectory(trained).identity}@{update}"
    assert Node.of_checkpoint(origin).children[0].text == f"held near {origin.reference}"
    # Another checkpoint of the reference changes nothing for a run that has begun.
    stages.train(trained, run=trained, steps=update + 1)
    stages.train(trained, run=run, steps=3, settings={"agent.reference": str(trained)})
    assert RunDirectory(run).load_document()["agent"]["reference"] == f"{trained}@{update}"
    # A run that begins with its weights has no reference unless it names one.
    stages.train(trained, run=tmp_path / "next", steps=1, settings={"init.source": str(run)})
    assert RunDirectory(tmp_path / "next").load_document()["agent"]["reference"] == ""


@pytest.mark.system
def test_a_ratio_changes_what_is_cloned(trained: Path, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    collect.run(tiny(collect={"logp": True}), lake=lake)
    found = {}
    for ratio in (0.0, 0.5):
        run = tmp_path / f"by-{ratio}"
        train.run(near(trained, reference_ratio=ratio), run=run, lakes=[(lake, 1.0)])
        found[ratio] = weights(run)
    assert any(not torch.equal(value, found[0.5][name]) for name, value in found[0.0].items())


def test_references_that_do_not_fit_are_refused(trained: Path, tmp_path: Path) -> None:
    lakes = [(trained / "lake", 1.0)]
    with pytest.raises(InputMissing, match=r"agent\.reference: no run or policy bundle at"):
        near(tmp_path / "nothing")
    with pytest.raises(InputMissing, match=r"agent\.reference: .* was trained for other spaces: "):
        train.run(near("zoo:cartpole"), run=tmp_path / "held", lakes=lakes)
    assert not (tmp_path / "held" / "checkpoints").exists()
    with pytest.raises(UsageError) as caught:
        near(trained, reference_weight=0)
    assert "agent.reference_weight" in caught.value.problems[0]
