"""Each way of training, by two ranks: the windows, losses and gradients of one process."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path

import pytest

from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.stages.library import collect
from tests.ranks import assert_alike, lines, small_lake, train

GROWING = """
    import os
    from pathlib import Path

    LAKE, PENDING = (Path(os.environ[name]) for name in ("LAKE", "PENDING"))
    calls = 0

    def grow(states, batch, mask):
        '''Publish another segment in the second micro-batch of every second update.'''
        global calls
        calls += 1
        update, place = divmod(calls - 1, 4 // int(os.environ.get("WORLD_SIZE", 1)))
        pending = sorted(PENDING.glob("segments/*/*.arrow"))
        if os.environ.get("RANK", "0") == "0" and place == 1 and update % 2 and pending:
            there = LAKE / pending[0].relative_to(PENDING)
            there.parent.mkdir(exist_ok=True)
            pending[0].rename(there)
        return states[:, 1:, 0] * 0
"""


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_lake(tmp_path_factory.mktemp("ranks") / "lake")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_lake(tmp_path_factory.mktemp("ranks") / "other")


KINDS: dict[str, dict[str, object]] = {
    "actor-critic": {},
    "multi-task": {"agent__kind": "multi-task"},
    "behaviour-cloning": {"agent__kind": "behaviour-cloning"},
    "priorities": {"train__per_alpha": 0.6},
    "packed": {"train__packing": True},
    "packed-bf16": {"train__packing": True, "train__precision": "bf16"},
    "auxiliary": {"agent__auxiliary_losses": "[{ kind = 'next-step' }]"},
    "weighted": {"train__weighting": "task", "train__half_life": 500.0},
    "gru": {"agent__sequence": "{ kind = 'gru', num_layers = 1, hidden = 8, output = 8 }", "train__burn_in": 2},
    "mingru": {"agent__sequence": "{ kind = 'mingru', num_layers = 1, d_model = 8 }"},
    "mamba": {"agent__sequence": "{ kind = 'mamba', num_layers = 1, d_model = 8 }"},
    "feedforward": {"agent__sequence": "{ kind = 'feedforward', num_layers = 1, d_model = 8, d_ff = 8 }"},
    "reference": {"agent__reference": "zoo:tmaze", "agent__reference_weight": 2.0},
    "averaged": {"train__ema_decay": 0.9, "train__activation_checkpointing": True},
}
SHARDED = ("actor-critic", "multi-task", "packed-bf16", "mingru", "mamba", "feedforward", "reference", "averaged")
KINDS |= {f"{kind}-sharded": {**KINDS[kind], "train__sharding": "fsdp"} for kind in SHARDED}


@pytest.mark.system
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "actor-critic" else pytest.mark.slow) for kind in KINDS],
)
def test_two_ranks_do_what_one_does(tmp_path: Path, lake: Path, kind: str) -> None:
    settings = KINDS[kind]
    for run, options in (("one", ()), ("two", ("--ranks", "2"))):
        done = train(lake, tmp_path / run, "--steps", "6", *options, **settings)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["metrics"].get("ranks", 1) == (2 if options else 1)
    if kind.startswith("packed-bf16"):  # alike until weights that differ by a rounding of float32 are rounded to bf16
        one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
        assert two[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-6)
        assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=0.02)
        assert [line["steps_seen"] for line in two] == [line["steps_seen"] for line in one]
    else:
        assert_alike(tmp_path / "one", tmp_path / "two")


@pytest.mark.system
@pytest.mark.slow
def test_two_ranks_mix_lakes_as_one_does(tmp_path: Path, lake: Path, other: Path) -> None:
    mixed = ("--from-lake", f"{other}:3..0.5", "--steps", "6")
    for run, options in (("one", ()), ("two", ("--ranks", "2"))):
        done = train(lake, tmp_path / run, *mixed, *options, train__batch_size=16, train__anneal_steps=4)
        assert done.returncode == 0, done.stderr
    assert_alike(tmp_path / "one", tmp_path / "two")


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize(
    "drawing",
    [{}, {"train__per_alpha": 0.6}, {"train__where": "length > 4", "train__weight": "length"}],
    ids=["uniform", "priorities", "selected"],
)
def test_two_ranks_follow_a_growing_lake_as_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawing: dict[str, object]
) -> None:
    """Segments come at fixed moments: a plug-in moves them into the lake while an update is computed."""
    whole = tmp_path / "whole"
    settings = {"collect.workers": 0, "collect.actors": 4}
    for steps in (200, 400, 600, 800):
        collect("tmaze", lake=whole, steps=steps, settings=settings)
    segments = sorted(whole.glob("segments/*/*.arrow"))
    assert len(segments) == 4
    for run, options in (("one", ()), ("two", ("--ranks", "2"))):
        growing, pending = tmp_path / run / "lake", tmp_path / run / "pending"
        for place in (growing, pending):
            shutil.copytree(whole, place, ignore=shutil.ignore_patterns("index.duckdb*"))
        for segment in segments:
            (pending if segment == segments[0] else growing).joinpath(segment.relative_to(whole)).unlink()
        (growing.parent / "growing.py").write_text(textwrap.dedent(GROWING))  # where the command is called
        monkeypatch.setenv("LAKE", str(growing))
        monkeypatch.setenv("PENDING", str(pending))
        more = {
            "agent__auxiliary_losses": "[{ kind = 'growing:grow' }]",
            "train__refresh_seconds": 1e-9,
            **drawing,
        }
        done = train(growing, tmp_path / run / "run", "--follow", "--steps", "10", *options, **more)
        assert done.returncode == 0, done.stderr
    assert_alike(tmp_path / "one/run", tmp_path / "two/run")
    steps = [line["env_steps"] for line in lines(tmp_path / "one/run")]
    assert steps == [line["env_steps"] for line in lines(tmp_path / "two/run")]
    assert len(set(steps)) == 4  # three segments came while it trained
    assert steps[-1] == query(Lake(whole), "select sum(length) from trajectories")[1][0][0]
