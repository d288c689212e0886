"""`train.sharding = "fsdp"`: ranks that share out the weights of blocks do what one process does, with less memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from pipelines.config.settings import TrainSettings
from pipelines.errors import UsageError
from pipelines.learning import checkpoint as checkpoints
from pipelines.nets import ranks
from pipelines.nets.rnn import GRU
from pipelines.training.learner import Learner
from pipelines.training.sharding import NO_SHARDS
from tests.cli.conftest import call
from tests.ranks import environment, small_lake
from tests.stages.recipes import tiny
from tests.training import sharded
from tests.training.test_learner import SPACES, batch, learner

FSDP = {"sharding": "fsdp"}


class Blockless(GRU):
    """A plug-in without blocks."""

    def __init__(self, input_size: int, settings: Any) -> None:
        super().__init__(input_size, tiny(agent={"sequence": {"kind": "gru", "hidden": 8}}).agent.sequence)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_lake(tmp_path_factory.mktemp("sharding") / "lake")


def launch(place: Path, size: int, **wanted: Any) -> list[dict[str, Any]]:
    """Run `tests.training.sharded` as `number` ranks; returns what each has found."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command = [*launcher, "-m", "tests.training.sharded", str(place), json.dumps(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(size)]


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Compare weights, averages, statistics and the optimiser's state, tensor by tensor."""
    a, b = checkpoints.load(one / "checkpoints"), checkpoints.load(other / "checkpoints")
    for mine, its in ((a.weights, b.weights), (a.average, b.average)):
        assert mine.keys() == its.keys()
        for name, value in mine.items():
            torch.testing.assert_close(its[name], value, rtol=1e-4, atol=1e-5, msg=name)
    mine, its = (each.training_state()["optimizer"] for each in (a, b))
    assert mine["param_groups"] == its["param_groups"]
    assert mine["state"].keys() == its["state"].keys()
    for number, state in mine["state"].items():
        assert state["step"] == its["state"][number]["step"]
        for name, near in (("exp_avg", 1e-7), ("exp_avg_sq", 1e-11)):
            torch.testing.assert_close(its["state"][number][name], state[name], rtol=1e-3, atol=near)


@pytest.mark.system
@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_with_a_share_of_the_weights_do_what_one_process_does(tmp_path: Path, number: int) -> None:
    """Three ranks: 32 rows make 11 + 11 + 10, and of four heads' scales one rank has none."""
    alone = sharded.updates(tmp_path / "one/checkpoints", 6, {})
    found = launch(tmp_path, number, number=6, train=FSDP)
    for place, figures in enumerate(alone["figures"]):
        its = [each["figures"][place] for each in found]
        assert sum(each["loss"] for each in its) / number == pytest.approx(figures["loss"], rel=1e-5)
        for each in its:
            assert each.keys() == figures.keys()
            for name in figures:
                if name.startswith("grad_norm"):
                    assert each[name] == pytest.approx(figures[name], rel=1e-5), name
    assert_same_checkpoint(tmp_path / "one", tmp_path)
    # of the blocks' weights, gradients, moments and averages each rank has its share, and nothing else of that size
    blocks = sum(found[0]["rows"].values())
    assert sum(sum(each["rows"].values()) for each in found) == alone["numel"] - (found[0]["numel"] - blocks)
    for each in found:
        assert each["all"] == alone["numel"]
        assert each["numel"] == each["state"]
        assert each["numel"] < (1 / number + 0.1) * alone["numel"]
        assert each["bytes"] < (1 / number + 0.1) * alone["bytes"]


@pytest.mark.full
@pytest.mark.parametrize(
    "steps",
    [
        [(2, "none"), (2, "fsdp"), (1, "fsdp")],
        pytest.param([(1, "fsdp"), (3, "fsdp"), (2, "fsdp"), (2, "none")], marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks_and_sharding(tmp_path: Path, steps: list[tuple[int, str]]) -> None:
    """Optimiser and average come along: the updates after a resume are those of one process that was never stopped."""
    alone = sharded.updates(tmp_path / "one/checkpoints", 2 * len(steps), {})
    losses = []
    for number, sharding in steps:
        found = launch(tmp_path, number, number=2, train={"sharding": sharding})
        for its in zip(*(each["figures"] for each in found), strict=True):
            losses.append(sum(each["loss"] for each in its) / number)
        assert bool(found[0]["rows"]) == (number > 1 and sharding == "fsdp")
    assert losses == pytest.approx([figures["loss"] for figures in alone["figures"]], rel=1e-5)
    assert_same_checkpoint(tmp_path / "one", tmp_path)


@pytest.mark.system
def test_one_process_with_sharding_is_one_without() -> None:
    plain, alone = (learner(sharding=sharding, ema_decay=0.9) for sharding in ("none", "fsdp"))
    for update in range(3):
        windows = batch(np.random.default_rng(update))
        for each in (plain, alone):
            each.step(lambda size, windows=windows: windows)
    assert not torch.distributed.is_initialized()
    assert alone.shards is NO_SHARDS
    for (name, one), other in zip(plain.agent.state_dict().items(), alone.agent.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("encoder", ["gru", "identity"])
def test_encoders_without_blocks_are_refused_as_settings(encoder: str, tmp_path: Path) -> None:
    refused = call(
        "train",
        "--from-lake",
        tmp_path,
        "--encoder",
        encoder,
        "--set",
        "train.sharding=fsdp",
        "--run",
        tmp_path / "run",
    )
    assert refused.code == 2
    assert f"train.sharding 'fsdp' needs a sequence encoder of blocks, and '{encoder}' has none" in refused.err
    assert not (tmp_path / "run").exists()


def test_a_plug_in_without_blocks_is_refused() -> None:
    settings = tiny(train=FSDP, agent={"sequence": {"kind": f"{__name__}:Blockless"}})
    with pytest.raises(UsageError, match="needs a sequence encoder of blocks, and Blockless has none"):
        Learner(SPACES, settings.agent, settings.train, seed=0)


def test_compilation_is_refused_together_with_sharding() -> None:
    with pytest.raises(ValidationError, match="compile is not possible together with sharding 'fsdp'"):
        TrainSettings(sharding="fsdp", compile=True)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_rows_are_divided_as_torch_divides_them(monkeypatch: pytest.MonkeyPatch, size: int, count: int) -> None:
    chunks = torch.arange(count).chunk(size)
    for rank in range(size):
        monkeypatch.setattr(ranks, "count_joined", lambda: size)
        monkeypatch.setattr(ranks, "get_rank", lambda rank=rank: rank)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert torch.arange(count)[ranks.find_own_rows(count)].tolist() == expected
