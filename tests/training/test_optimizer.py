"""Which parameters decay, listed by hand for every encoder and head; that a group's decay is what AdamW applies; and
Muon beside torch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from pipelines.config.model import AgentSettings
from pipelines.config.settings import TrainSettings
from pipelines.lake.spaces import Box, Discrete, MultiDiscrete, Ragged, Space, Spaces
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.agent import Agent
from pipelines.training.learner import Learner
from pipelines.training.optimizer import (
    ScaledAdamW,
    find_decayed,
    find_matrices,
    learning_rate,
    make_optimizer,
    orthogonalize,
)
from tests.stages.recipes import tiny
from tests.training.test_learner import SPACES, batch, learner

SMALL: dict[str, Any] = {
    "timestep": {"hidden": [8], "output": 8},
    "sequence": {"kind": "identity"},
    "actor": {"hidden": [8]},
    "critic": {"hidden": [8]},
    "gammas": [0.9],
}
TRANSFORMER = {"d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 16}
BLOCK = ("blocks.0.qkv.weight", "blocks.0.merge.weight", "blocks.0.expand.weight", "blocks.0.contract.weight")

# All that decays below `sequence`.
SEQUENCES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "transformer": ({"kind": "transformer", **TRANSFORMER}, {"embed.weight", *BLOCK}),
    "transformer, learned positions": (
        {"kind": "transformer", **TRANSFORMER, "position": "learned", "max_time": 32}, {"embed.weight", *BLOCK},
    ),
    "transformer, plain linears and RMS norms": (
        {"kind": "transformer", **TRANSFORMER, "sigma_reparam": False, "norm": "rms"}, {"embed.weight", *BLOCK},
    ),
    "gru": (
        {"kind": "gru", "num_layers": 2, "hidden": 8, "output": 8},
        {"rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.weight_ih_l1", "rnn.weight_hh_l1", "head.0.weight"},
    ),
    "mingru": (
        {"kind": "mingru", "d_model": 8, "num_layers": 1},
        {"embed.weight", "blocks.0.inputs.weight", "blocks.0.output.weight"},
    ),
    "mamba": (
        {"kind": "mamba", "d_model": 8, "num_layers": 1, "state": 4},
        {
            "embed.weight", "blocks.0.inputs.weight", "blocks.0.taps_IK", "blocks.0.select.weight",
            "blocks.0.step_size.weight", "blocks.0.output.weight",
        },
    ),
    "feedforward": (
        {"kind": "feedforward", "d_model": 8, "num_layers": 1, "d_ff": 16},
        {"embed.weight", "blocks.0.expand.weight", "blocks.0.contract.weight", "last.weight"},
    ),
    "identity": ({"kind": "identity"}, set()),
}  # fmt: skip
IMAGE = {"obs": Box(shape=(15, 15, 3), dtype="uint8")}
IMAGES = {f"image_encoders.0.{name}" for name in ("convolutions.0.weight", "convolutions.2.weight", "head.weight")}
IMPALA = {
    *(f"image_encoders.0.convolutions.{stage}.weight" for stage in (0, 4, 8)),
    *(f"image_encoders.0.convolutions.{b}.body.{layer}.weight" for b in (2, 3, 6, 7, 10, 11) for layer in (1, 3)),
    "image_encoders.0.head.weight",
}
# The same below `timestep`.
TIMESTEPS: dict[str, tuple[dict[str, Space], dict[str, Any], set[str]]] = {
    "flat": ({"obs": Box(shape=(3,))}, {}, {"body.hidden.0.weight", "body.last.weight"}),
    "grid": (IMAGE, {}, {*IMAGES, "image_encoders.0.convolutions.4.weight", "extras.weight", "body.weight"}),
    "impala": (IMAGE, {"image": {"kind": "impala"}}, {*IMPALA, "extras.weight", "body.weight"}),
    "text": (
        {"obs": Ragged(max_length=5, dtype="int32"), "obs.length": Discrete(n=6)}, {},
        {
            "token_encoders.0.rnn.weight_ih_l0", "token_encoders.0.rnn.weight_hh_l0",
            "body.hidden.0.weight", "body.last.weight",
        },
    ),
}  # fmt: skip
ACTOR = {"actor.net.hidden.0.weight", "actor.net.last.weight"}
CRITIC = {"critic.weights.0", "critic.last_weight"}
RESIDUAL = {
    *(f"actor.net.hidden.{name}.weight" for name in ("0.hidden.0", "0.last", "1.expand", "1.contract")),
    "actor.net.last.weight",
}  # fmt: skip
# The same below `heads`.
HEADS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "table": ({}, ACTOR | CRITIC),
    "residual actor": ({"actor": {"hidden": [8, 6], "residual": True}}, RESIDUAL | CRITIC),
    "two-hot": ({"kind": "multi-task"}, ACTOR | CRITIC),
    "no critics": ({"kind": "behaviour-cloning"}, ACTOR),
}


def made(observation: dict[str, Space] | None = None, action: Space | None = None, **changes: Any) -> Agent:
    spaces = Spaces(observation=observation or {"obs": Box(shape=(3,))}, action=action or Discrete(n=4))
    return Agent(spaces, AgentSettings.model_validate(SMALL | changes))


def below(part: str, agent: Agent) -> set[str]:
    return {name.removeprefix(f"{part}.") for name in find_decayed(agent) if name.startswith(f"{part}.")}


@pytest.mark.parametrize("case", SEQUENCES)
def test_kernels_of_every_sequence_encoder_decay_and_nothing_else(case: str) -> None:
    settings, kernels = SEQUENCES[case]
    assert below("sequence", made(sequence=settings)) == kernels


@pytest.mark.parametrize("case", TIMESTEPS)
def test_kernels_of_every_timestep_encoder_decay_and_nothing_else(case: str) -> None:
    observation, changes, kernels = TIMESTEPS[case]
    assert below("timestep", made(observation, timestep=SMALL["timestep"] | changes)) == kernels


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("action", [Discrete(n=4), Box(shape=(2,)), MultiDiscrete(nvec=(2, 3))], ids=str)
def test_kernels_of_every_head_decay_and_nothing_else(case: str, action: Space) -> None:
    changes, kernels = HEADS[case]
    agent = made(action=action, **changes)
    assert below("heads", agent) == kernels
    assert below("target_heads", agent) == set()


def test_without_gradients_kernels_shrink_by_rate_times_decay_and_the_rest_stays() -> None:
    agent = made(sequence=SEQUENCES["transformer, learned positions"][0])
    kernels, trainable = find_decayed(agent), {n: p for n, p in agent.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(agent, TrainSettings(learning_rate=0.1, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in trainable.items()}
    for parameter in trainable.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in trainable.items():
        share = 0.95 if name in kernels else 1.0
        torch.testing.assert_close(parameter.detach(), share * before[name], rtol=1e-6, atol=0)
    assert {"sequence.position.weight", "sequence.blocks.0.head_scale", "sequence.blocks.0.qkv.gain"} < {*trainable}


def test_every_trainable_parameter_is_in_one_group() -> None:
    agent = made(sequence=SEQUENCES["mamba"][0])
    optimizer = make_optimizer(agent, TrainSettings())
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in agent.trainable_parameters().values())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_of_all_groups_survive_a_checkpoint(optimizer: Any, tmp_path: Path) -> None:
    data, first = batch(np.random.default_rng(0)), learner(optimizer=optimizer)
    first.step(lambda size: data)
    first.save(tmp_path, {"env": {}})
    again = learner(optimizer=optimizer)
    again.restore(checkpoints.load(tmp_path))
    assert [group["weight_decay"] for group in again.optimizer.param_groups][:2] == [1e-3, 0.0]
    matrices = find_matrices(again.agent) if optimizer == "muon" else set()
    for name, ours, theirs in zip(again.names, again.parameters, first.parameters, strict=True):
        kept = {"step", "momentum"} if name in matrices else {"step", "exp_avg", "exp_avg_sq"}
        assert again.optimizer.state[ours].keys() == kept
        for key, value in first.optimizer.state[theirs].items():
            assert torch.equal(again.optimizer.state[ours][key], value)
    for each in (first, again):
        each.step(lambda size: data)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again.parameters, first.parameters, strict=True))


def test_muon_moves_the_matrices_of_blocks_as_torch_does_and_all_else_by_adamw() -> None:
    changes = {"sequence": SEQUENCES["transformer"][0]}
    ours, theirs = made(**changes), made(**changes)
    settings = TrainSettings(optimizer="muon", learning_rate=0.01, weight_decay=0.5)
    optimizer, matrices = make_optimizer(ours, settings), find_matrices(ours)
    assert matrices == {f"sequence.{name}" for name in BLOCK}
    named = theirs.trainable_parameters()
    same: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.5}
    judges = [
        torch.optim.Muon([named[n] for n in sorted(matrices)], **same, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [
                {"params": [p for n, p in named.items() if n in find_decayed(theirs) - matrices]},
                {"params": [p for n, p in named.items() if n not in find_decayed(theirs)], "weight_decay": 0.0},
            ],
            **same, fused=True,
        ),
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for _ in range(5):
        optimizer.grad_scale = torch.tensor(4.0)
        for name, parameter in ours.trainable_parameters().items():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad, named[name].grad = 4 * gradient, gradient
        for each in (optimizer, *judges):
            each.step()
    for name, parameter in ours.trainable_parameters().items():
        if name in matrices:  # torch rounds to bfloat16 meanwhile
            moved = (parameter - before[name]).detach()
            assert (parameter - named[name]).abs().max() < 0.03 * moved.abs().max()
        else:
            torch.testing.assert_close(parameter, named[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 48, 16), (1, 8, 40)])
def test_orthogonal_matrices_keep_singular_vectors_and_bring_singular_values_near_one(shape: Any) -> None:
    given = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, _, v = torch.linalg.svd(given, full_matrices=False)
    within = u.mT @ orthogonalize(1000 * given) @ v.mT  # diagonal, if the singular vectors are the same
    values = within.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(within, torch.diag_embed(values), atol=1e-4, rtol=0)
    assert (values > 0.3).all()
    assert (values < 1.3).all()


def test_without_blocks_adamw_moves_all_weights_and_says_so() -> None:
    settings = tiny(agent={"sequence": {"kind": "gru"}}, train={"optimizer": "muon"})
    trained = Learner(SPACES, settings.agent, settings.train, seed=3)
    assert (type(trained.optimizer), len(trained.optimizer.param_groups)) == (ScaledAdamW, 2)
    assert trained.notices == ["train.optimizer: AdamW moves all weights, since GRU has no blocks for Muon"]


def test_muon_is_refused_where_a_rank_has_rows_of_a_matrix() -> None:
    with pytest.raises(ValidationError, match="'muon' needs whole matrices"):
        TrainSettings(optimizer="muon", sharding="fsdp")


def test_the_rate_warms_up_and_then_holds_or_decays() -> None:
    hold = TrainSettings(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(u, hold) for u in (0, 1, 3, 4, 1000)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    decay = TrainSettings(learning_rate=1.0, warmup_steps=0, decay_steps=100)
    assert [round(learning_rate(u, decay), 4) for u in (0, 50, 100, 200)] == [1.0, 0.55, 0.1, 0.1]
