"""What tells the kinds of agents apart."""

import copy
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from pipelines.errors import InputMissing, UsageError
from pipelines.lake.spaces import Box, MultiBinary
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.agent import ReferencePolicy
from pipelines.learning.agent_types import AgentType
from pipelines.learning.diagnostics import inspect
from tests.learning.factories import ACTIONS, agent, batch, padded, windows
from tests.learning.test_agent import generator, gradients, in_parts, update

KINDS = ["actor-critic", "multi-task", "behaviour-cloning"]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", ["multi-task", "behaviour-cloning"])
def test_every_kind_takes_an_update_on_every_action_space(kind, action):
    owner = agent(action, kind=kind)
    before = copy.deepcopy(owner.state_dict())
    metrics = update(owner, batch(owner))
    assert all(torch.isfinite(value).all() for value in metrics.values())
    unmoved = [n for n, p in owner.named_parameters() if torch.equal(p, before[n])]
    assert unmoved == []


def test_defaults_of_the_kinds():
    found = {kind: agent(kind=kind).agent_type for kind in KINDS}
    weights = {kind: (k.actor_weight, k.bc_weight) for kind, k in found.items()}
    assert weights == {"actor-critic": (1.0, 0.1), "multi-task": (0.0, 1.0), "behaviour-cloning": (0.0, 1.0)}
    assert [found["multi-task"].critic_samples, found["multi-task"].actor_samples] == [1, 3]
    assert agent(kind="multi-task", bc_weight=0.5, actor_samples=2).agent_type.bc_weight == 0.5


def test_behaviour_cloning_is_the_likelihood_of_the_actions_and_nothing_else():
    owner = agent("discrete", sequence="identity", kind="behaviour-cloning")
    assert owner.target_heads is None
    assert owner.gammas == (0.99,)
    data, same = batch(owner), copy.deepcopy(owner)
    loss, metrics = owner.loss(data, generator())
    same._update_statistics([data])
    params = same.heads.actor(same.encode(data)[:, :-1][data.mask])[:, 0]
    expected = -same.heads.policy.log_prob(params, data.action[:, 1:][data.mask]).mean()
    torch.testing.assert_close(loss, expected)
    assert "q" not in metrics


OWN = AgentType(critic="scalar", actor_weight=0.5, bc_weight=0.3, actor_samples=2)


@pytest.mark.parametrize("action", ["discrete", "box"])
def test_a_kind_of_ones_own_is_named_in_the_settings(action):
    said = {"actor_weight": 0.5, "bc_weight": 0.3, "actor_samples": 2}
    own, same = agent(action, kind=f"{__name__}:OWN"), agent(action, **said)
    assert own.agent_type == OWN
    losses = [owner.loss(batch(owner), generator())[0] for owner in (own, same)]
    assert torch.equal(*losses)
    assert agent(action, kind=f"{__name__}:OWN", actor_weight=0.0).agent_type.actor_weight == 0.0


def test_what_is_not_a_kind_is_refused():
    with pytest.raises(UsageError, match="is not an AgentType but a function"):
        agent(kind=f"{__name__}:smooth")
    with pytest.raises(InputMissing, match="no module"):
        agent(kind="no_such_module:KIND")
    with pytest.raises(ValidationError, match="known: actor-critic, behaviour-cloning, multi-task, or module:attr"):
        agent(kind="dreamer")
    with pytest.raises(ValidationError, match="did you mean 'actor-critic'"):
        agent(kind="actor-critics")


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing_for_any_kind(kind):
    results = []
    for extra in (0, 4):
        owner = agent("discrete", kind=kind, sequence="gru")
        source = windows(owner.spaces)
        data = batch(owner) if not extra else _padded_batch(owner, source, extra)
        loss, _ = owner.loss(data, generator())
        loss.backward()
        results.append((loss.detach(), gradients(owner)))
    (loss, grads), (loss_p, grads_p) = results
    torch.testing.assert_close(loss_p, loss)
    for name in grads:
        torch.testing.assert_close(grads_p[name], grads[name], atol=1e-6, rtol=1e-4)


def _padded_batch(owner, source, extra):
    from tests.learning.test_agent import _uncut

    return _uncut(padded(source, extra), owner.spaces)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_add_up_for_every_kind(kind):
    whole, parts = agent(kind=kind, sequence="gru"), agent(kind=kind, sequence="gru")
    data = batch(whole)
    whole.loss(data, generator())[0].backward()
    for loss, _ in parts.losses(*in_parts(data, 3)):
        loss.backward()
    for name, grad in gradients(whole).items():
        torch.testing.assert_close(gradients(parts)[name], grad, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_carries_everything_for_every_kind(kind):
    first, second = agent(kind=kind), agent(kind=kind, seed=9)
    update(first, batch(first))
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(update(second, batch(first), 5), update(first, batch(first), 5), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["actor-critic", "multi-task"])
@pytest.mark.parametrize("action", ["discrete", "multi_discrete", "box"])
def test_an_update_in_lower_precision(kind, action):
    owner = agent(action, kind=kind)
    with torch.autocast("cpu", torch.bfloat16):
        loss, metrics = owner.loss(batch(owner), generator())
    loss.backward()
    same = agent(action, kind=kind)
    full, _ = same.loss(batch(same), generator())
    assert loss.item() == pytest.approx(full.item(), rel=0.05)
    assert all(
        torch.isfinite(p.grad).all() and p.grad.dtype == torch.float32 for p in owner.trainable_parameters().values()
    )
    assert metrics["q"].dtype == torch.float32


# Legal actions


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("action", ["discrete", "multi_discrete", "multi_binary"])
def test_what_is_illegal_is_never_done(kind, action):
    size = ACTIONS[action].flat_size
    observation = {"obs": Box(shape=(3,)), "obs.legal": MultiBinary(n=size)}
    owner = agent(action, observation, kind=kind, action_mask="obs.legal")
    source = windows(owner.spaces, lengths=(9,) * 200)
    legal = source.columns["obs.legal"][:, 0].astype(bool)
    shown = {name: source.columns[name][:, 0] for name in observation}
    for greedy in (False, True):
        policy = AgentPolicy(owner, num_actors=200, capacity=4, greedy=greedy)
        actions = policy.act(shown, source.columns["action"][:, 0], source.columns["reward"][:, 0], windows_zero(200))
        done = features_of(owner, actions)
        if action == "multi_binary":
            assert not (done & ~legal).any()
            continue
        sizes = list(getattr(owner.spaces.action, "nvec", (size,)))
        for part_done, part_legal in zip(split(done, sizes), split(legal, sizes), strict=True):
            some = part_legal.any(1)  # where nothing is legal, everything is
            assert not (part_done & ~part_legal)[some].any()


def windows_zero(count):
    return torch.zeros(count, dtype=torch.int64).numpy()


def features_of(owner, actions):
    from pipelines.nets.inputs import to_features

    return to_features(torch.from_numpy(actions), owner.spaces.action).bool().numpy()


def split(array, sizes):
    return [part.numpy() for part in torch.from_numpy(array).split(sizes, 1)]


@pytest.mark.parametrize(("name", "observation", "action"), [
    ("obs.legal", {"obs": Box(shape=(3,))}, "discrete"),
    ("obs", {"obs": Box(shape=(3,))}, "discrete"),
    ("obs", {"obs": Box(shape=(2,))}, "box"),
])  # fmt: skip
def test_a_column_that_cannot_say_what_is_legal_is_the_users_error(name, observation, action):
    with pytest.raises(UsageError, match="action_mask"):
        agent(action, observation, action_mask=name)


# Losses of the user's own


def smooth(states, batch, mask, *, factor=1.0):
    out = factor * (states[:, 1:] - states[:, :-1]).square().mean(-1)
    return torch.where(mask, out, torch.nan)  # what is masked must not matter


class Forward(nn.Module):
    def __init__(self, spaces, state_size, *, hidden=4):
        super().__init__()
        self.net = nn.Linear(state_size, spaces.observation["obs"].flat_size)

    def forward(self, states, batch, mask):
        return (self.net(states[:, :-1]) - batch.observation["obs"][:, 1:]).square()


def wrong_shape(states, batch, mask):
    return states.mean()


def test_a_function_adds_its_masked_mean():
    losses = [{"kind": f"{__name__}:smooth", "weight": 0.5, "options": {"factor": 2.0}}]
    plain, owner = agent(sequence="gru"), agent(sequence="gru", auxiliary_losses=losses)
    data = batch(owner)
    base, _ = plain.loss(data, generator())
    total, metrics = owner.loss(data, generator())
    states = plain.encode(data)
    by_step = 2 * (states[:, 1:] - states[:, :-1]).square().mean(-1)
    torch.testing.assert_close(metrics["auxiliary_loss_0"], by_step[data.mask].mean().detach())
    torch.testing.assert_close(total, base + 0.5 * by_step[data.mask].mean())


def test_a_module_is_trained_and_saved():
    owner = agent(auxiliary_losses=[{"kind": f"{__name__}:Forward"}])
    before = copy.deepcopy(owner.state_dict())
    extra = {name for name in before if name.startswith("auxiliary.")}
    assert extra == {"auxiliary.0.module.net.weight", "auxiliary.0.module.net.bias"}
    update(owner, batch(owner))
    assert all(not torch.equal(p, before[n]) for n, p in owner.named_parameters() if n.startswith("auxiliary."))


@pytest.mark.parametrize("wrong", [{"kind": "smooth", "options": {"x": 1}}, {"kind": "Forward", "options": {"x": 1}}])
def test_options_that_a_loss_does_not_take_are_the_users_error(wrong):
    with pytest.raises(UsageError, match="unexpected keyword"):
        agent(auxiliary_losses=[wrong | {"kind": f"{__name__}:{wrong['kind']}"}])


def test_a_loss_has_a_number_for_each_step():
    owner = agent(auxiliary_losses=[{"kind": f"{__name__}:wrong_shape"}])
    with pytest.raises(UsageError, match="not one value for each"):
        owner.loss(batch(owner))


# What an agent thinks


@pytest.mark.parametrize("kind", ["actor-critic", "multi-task"])
@pytest.mark.parametrize("action", ["discrete", "box"])
def test_inspection_says_what_an_update_would_see_and_changes_nothing(kind, action):
    owner = agent(action, kind=kind, sequence="gru")
    update(owner, batch(owner))
    before, data = copy.deepcopy(owner.state_dict()), batch(owner, seed=4)
    figures = inspect(owner, data)
    torch.testing.assert_close(owner.state_dict(), before, rtol=0, atol=0)
    assert owner.training
    shape = (*data.mask.shape, 3)
    assert all(array.shape == shape for name, array in figures.items() if name != "mask")
    mask = data.mask.numpy()
    for name, array in figures.items():
        if name != "mask":
            assert torch.isfinite(torch.from_numpy(array[mask])).all(), name
            assert torch.isnan(torch.from_numpy(array[~mask])).all(), name
    steps = owner.valid_steps(data, owner.encode(data))
    critics = owner.evaluate(steps, torch.zeros(int(mask.sum()), 3), generator())
    q = owner.reward_units(critics.data.q_CNG).mean(0)
    torch.testing.assert_close(torch.from_numpy(figures["q"][mask]), q)
    expected = (figures["advantage"][mask] > 0).astype("f4")
    assert (figures["weight"][mask] == expected).all()


def test_an_agent_without_critics_has_no_values():
    owner = agent(kind="behaviour-cloning")
    with pytest.raises(UsageError, match="has no values"):
        inspect(owner, batch(owner))


def test_every_metric_is_documented():
    owner = agent(gammas=[0.9], auxiliary_losses=[{"kind": f"{__name__}:smooth"}])
    _, metrics = owner.loss(batch(owner), generator())
    moving = agent("box", entropy_weight="auto")
    metrics |= {name: value for name, value in moving.loss(batch(moving), generator())[1].items() if "weight" in name}
    near = agent()
    near.reference = ReferencePolicy(agent(seed=1), of=near)
    metrics |= {"reference_loss": near.loss(batch(near), generator())[1]["reference_loss"]}
    text = (Path(__file__).parents[2] / "docs" / "learning.md").read_text()
    table = text[text.index("## Metrics") : text.index("## Speed")]
    documented = set(
        re.findall(r"`([\w*]+)`", "".join(row.split("|")[1] for row in re.findall(r"^\|.*$", table, re.M)))
    )
    of_training = {
        "grad_norm*",
        "skipped_*",
        "attention_*",
        "dead_units*",
        "replay_ratio",
        "gap_to_spread",
        "in_flight_share",
        "*_per_second",
        "steps_seen",
        "env_steps",
    }
    own = {name for name in documented - {"metric"} if not any(fnmatch(name, pattern) for pattern in of_training)}
    names = {name.partition("@")[0] for name in metrics}
    assert {name for name in names if not any(fnmatch(name, pattern) for pattern in own)} == set()
    assert {pattern for pattern in own if not any(fnmatch(name, pattern) for name in names)} == set()
    assert {name for name in metrics if "@" in name} >= {"q@0.9", "td_error@0.9", "popart_sigma@0.9"}
