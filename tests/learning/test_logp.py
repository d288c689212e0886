"""Targets from the stored log-probabilities of actions: V-trace and Retrace, against the literal sums of the papers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, MultiBinary
from pipelines.learning.agent import Agent
from pipelines.learning.batch import TensorBatch
from tests.learning.factories import ACTIONS, agent, windows
from tests.learning.test_agent import generator, gradients, in_parts
from tests.learning.test_literal import GRID, LENGTHS, batch, compare, made


def with_logp(data: TensorBatch, *, seed: int = 4) -> TensorBatch:
    """The batch with probabilities from 0.02 to 1 of its actions, some below and some above the policy's."""
    drawn = torch.rand(data.reward.shape, generator=torch.Generator().manual_seed(seed))
    return replace(data, logp=(0.02 + 0.98 * drawn).log())


@pytest.mark.parametrize("decay", [1.0, 0.7])
@pytest.mark.parametrize("trace", ["vtrace", "retrace"])
@pytest.mark.parametrize(
    ("action", "changes"),
    [("discrete", {}), ("box", {"actor": GRID}), ("discrete", {"target_actor": False})],
    ids=["choices", "grid", "online actor"],
)
def test_update_equals_the_literal_one(trace: str, decay: float, action: str, changes: dict[str, Any]) -> None:
    owner = made(action, {"trace": trace, "trace_decay": decay, **changes})
    compare(owner, with_logp(batch(owner, **LENGTHS)))


@pytest.mark.parametrize("trace", ["vtrace", "retrace"])
def test_illegal_actions_have_no_part_in_it(trace: str) -> None:
    observation = {"obs": Box(shape=(3,)), "obs.legal": MultiBinary(n=ACTIONS["discrete"].flat_size)}
    owner = made("discrete", {"trace": trace, "action_mask": "obs.legal"}, observation=observation)
    compare(owner, with_logp(batch(owner, **LENGTHS)))


def on_policy(owner: Agent, data: TensorBatch, h: torch.Tensor, factor: float = 1.0) -> TensorBatch:
    """The batch with the probabilities that the target policy of the one discount gives its actions, times `factor`."""
    assert owner.target_heads is not None
    params = owner.target_heads.actor(h[:, :-1])[:, :, 0]
    logp = torch.zeros_like(data.reward)
    logp[:, 1:] = owner.heads.policy.log_prob(params, data.action[:, 1:]) + torch.tensor(factor).log()
    return replace(data, logp=logp.detach())


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_on_policy_targets_are_n_step_returns(factor: float) -> None:
    """rho = c = 1, also where the policy takes actions more often than the data's did."""
    owner = made("discrete", {"trace": "vtrace", "trace_decay": 1.0, "gammas": []})
    plain = made("discrete", {"n_step": 100, "gammas": []})
    data = batch(owner, **LENGTHS)
    h = owner.encode(data).detach()
    expected = plain.targets(data, h, generator())
    torch.testing.assert_close(owner.targets(on_policy(owner, data, h, factor), h, generator()), expected)
    off = owner.targets(on_policy(owner, data, h, 1.5), h, generator())
    assert not torch.allclose(off, expected)


def test_an_action_that_the_policy_never_takes_ends_the_correction() -> None:
    """With rho = c = 0 the target is the reward and the value of the next state: a one-step target."""
    owner = made("discrete", {"trace": "vtrace", "gammas": []})
    plain = made("discrete", {"n_step": 1, "gammas": []})
    data = batch(owner, **LENGTHS)
    h = owner.encode(data).detach()
    never = replace(data, logp=torch.full_like(data.reward, 80.0))  # as if pi / mu were e^-80
    torch.testing.assert_close(owner.targets(never, h, generator()), plain.targets(data, h, generator()))


def test_tiny_probabilities_leave_targets_finite() -> None:
    owner = made("discrete", {"trace": "vtrace", "action_mask": "obs.legal"}, observation={
        "obs": Box(shape=(3,)), "obs.legal": MultiBinary(n=ACTIONS["discrete"].flat_size),
    })  # fmt: skip
    data = batch(owner, **LENGTHS)
    found = owner.targets(replace(data, logp=torch.full_like(data.reward, -200.0)), owner.encode(data), generator())
    assert found.isfinite().all()


def test_micro_batches_add_up_to_the_batch() -> None:
    whole, parts = made("discrete", {"trace": "vtrace"}), made("discrete", {"trace": "vtrace"})
    data = with_logp(batch(whole, **LENGTHS))
    whole.loss(data, generator())[0].backward()
    for part, _ in parts.losses(*in_parts(data, 2)):
        part.backward()
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradients(parts)[name], gradient, msg=name)


def test_rows_of_windows_keep_their_logp() -> None:
    owner = agent("discrete")
    source = windows(owner.spaces, **LENGTHS)
    source.columns["logp"] = -(source.columns["reward"] ** 2)
    data = TensorBatch.from_numpy(source, owner.spaces, logp=True)
    assert data.logp is not None
    torch.testing.assert_close(data.logp, -data.reward.square())
    assert TensorBatch.from_numpy(source, owner.spaces).logp is None


@pytest.mark.parametrize(
    ("action", "changes"), [("box", {}), ("multi_discrete", {}), ("discrete", {"kind": "multi-task"})]
)
def test_agents_without_a_value_of_each_action_are_refused(action: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"agent\.trace 'vtrace' needs a value for each action"):
        agent(action, trace="vtrace", **changes)
