"""Acting equals the full forward, for actors at different places of their episodes."""

import itertools

import numpy as np
import pytest
import torch

from pipelines.errors import UsageError
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.batch import TensorBatch
from tests.learning.factories import ACTIONS, SEQUENCES, agent, batch, windows

STEPS, ACTORS = 9, 4


def shaken(action, sequence, **changes):
    owner = agent(action, sequence=sequence, **changes)
    for parameter in owner.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    owner.timestep.update_statistics([batch(owner)])
    return owner


def stream(owner, *, seed=0):
    """ACTORS trajectories of STEPS tokens from time 0."""
    source = windows(owner.spaces, lengths=(STEPS,) * ACTORS, rows=STEPS, seed=seed, terminated=0.0)
    source.start[:] = 0
    for name in ("action", "reward"):
        source.columns[name][:, 0] = 0
    return source


def act(policy, source, rows, actors=range(ACTORS)):
    """One token of every actor: row `rows[i]` of trajectory i."""
    pick = list(actors), list(rows)
    obs = {name: source.columns[name][pick] for name in policy.agent.spaces.observation}
    return policy.act(obs, source.columns["action"][pick], source.columns["reward"][pick], np.asarray(rows))


@torch.no_grad()
def greedy_by_forward(owner, source):
    """(ACTORS, STEPS, ...) the acting discount's best actions by one full forward."""
    owner.eval()
    h = owner.encode(TensorBatch.from_numpy(source, owner.spaces))
    policy = owner.heads.policy
    return policy.to_stored(policy.mode(owner.heads.actor(h)[..., -1, :])).numpy()


@pytest.mark.parametrize(
    ("action", "sequence", "shortcut"),
    [*itertools.product(ACTIONS, SEQUENCES, [False]), *itertools.product(["box"], SEQUENCES, [True])],
)
def test_staggered_actors_with_resets_act_as_the_full_forward(action, sequence, shortcut):
    owner = shaken(action, sequence, shortcut=shortcut)
    first, second = stream(owner, seed=1), stream(owner, seed=2)
    expected = greedy_by_forward(owner, first), greedy_by_forward(owner, second)
    policy = AgentPolicy(owner, num_actors=ACTORS, capacity=STEPS, greedy=True)
    owner.train()
    rows, episode = np.zeros(ACTORS, int), np.zeros(ACTORS, int)
    for step in range(14):
        for actor in range(ACTORS):  # actor i leaves its first episode after i + 2 steps
            if episode[actor] == 0 and rows[actor] == actor + 2:
                rows[actor], episode[actor] = 0, 1
        rows = np.where(rows == STEPS, 0, rows)
        sources = [(first, second)[e] for e in episode]
        mixed = {n: np.stack([s.columns[n][i, r] for i, (s, r) in enumerate(zip(sources, rows, strict=True))])
                 for n in first.columns}  # fmt: skip
        actions = policy.act({"obs": mixed["obs"]}, mixed["action"], mixed["reward"], rows)
        for actor in range(ACTORS):
            wanted = expected[episode[actor]][actor, rows[actor]]
            np.testing.assert_allclose(actions[actor], wanted, atol=1e-5, err_msg=f"step {step} actor {actor}")
        rows = rows + 1


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
def test_a_shortcut_shows_the_heads_the_step_itself_beside_its_memory(packed):
    plain, cut = (agent("box", sequence="transformer", shortcut=shortcut).eval() for shortcut in (False, True))
    cut.timestep.load_state_dict(plain.timestep.state_dict())
    cut.sequence.load_state_dict(plain.sequence.state_dict())
    plain.packed = cut.packed = packed
    windows = TensorBatch.from_numpy(stream(plain), plain.spaces)
    token = plain.timestep(windows.observation, windows.action, windows.reward, windows.time)
    torch.testing.assert_close(cut.encode(windows), torch.cat((token, plain.encode(windows)), -1))
    assert not agent("box", sequence="identity", shortcut=True).shortcut  # it would see the same twice


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_rebuild_restores_memories_under_new_weights(sequence):
    owner = shaken("box", sequence)
    source = stream(owner)
    policy = AgentPolicy(owner, num_actors=ACTORS, capacity=STEPS, greedy=True)
    for step in range(3):
        act(policy, source, [step] * ACTORS)
    for parameter in owner.parameters():
        parameter.data *= 1.3
    lengths = [0, 2, 5, 8]
    names = ("obs", "action", "reward")
    policy.rebuild([{n: source.columns[n][i, :t] for n in names} for i, t in enumerate(lengths)])
    expected = greedy_by_forward(owner, source)
    actions = act(policy, source, lengths)
    for actor, row in enumerate(lengths):
        np.testing.assert_allclose(actions[actor], expected[actor, row], atol=1e-5)
    policy.rebuild([{n: source.columns[n][i, :0] for n in names} for i in range(ACTORS)])
    np.testing.assert_allclose(act(policy, source, [0] * ACTORS), expected[:, 0], atol=1e-5)


@pytest.mark.parametrize("action", ACTIONS)
def test_actions_have_the_stored_form(action):
    owner = shaken(action, "feedforward")
    space = owner.spaces.action
    for greedy in (False, True):
        policy = AgentPolicy(owner, num_actors=ACTORS, capacity=STEPS, greedy=greedy)
        actions = act(policy, stream(owner), [0] * ACTORS)
        assert actions.shape == (ACTORS, *space.shape)
        assert actions.dtype == space.dtype


def test_samples_follow_the_seed_and_the_restored_generator():
    owner = shaken("box", "gru")
    source = stream(owner)
    one, two, other = (AgentPolicy(owner, num_actors=ACTORS, capacity=4, seed=s) for s in (1, 1, 2))
    torch.manual_seed(0)
    first = act(one, source, [0] * ACTORS)
    torch.manual_seed(5)
    assert np.array_equal(first, act(two, source, [0] * ACTORS))
    assert not np.array_equal(first, act(other, source, [0] * ACTORS))
    other.load_state_dict(one.state_dict())
    assert np.array_equal(act(other, source, [0] * ACTORS), act(one, source, [0] * ACTORS))


def test_choices_at_a_temperature_follow_the_probabilities_to_that_power():
    owner, many = shaken("discrete", "gru"), 4_000
    row = {name: column[:1, 0] for name, column in stream(owner).columns.items()}
    wide = {name: np.repeat(column, many, 0) for name, column in row.items()}

    def act_once(**options):
        policy = AgentPolicy(owner, num_actors=many, capacity=STEPS, seed=3, **options)
        actions = policy.act({"obs": wide["obs"]}, wide["action"], wide["reward"], np.zeros(many, int))
        return actions, policy

    plain, policy = act_once()
    choices = np.arange(policy.num_choices)
    probs = np.array([np.exp(policy.log_prob(np.full(many, choice, np.int32))[0]) for choice in choices])
    wanted = probs**4 / (probs**4).sum()
    sharp, policy = act_once(temperature=0.25)
    frequency = np.bincount(sharp, minlength=len(choices)) / many
    np.testing.assert_allclose(frequency, wanted, atol=4 * 0.5 / many**0.5)
    assert abs(wanted - probs).max() > 0.1
    known = [np.exp(policy.log_prob(np.full(many, choice, np.int32))[0]) for choice in choices]
    np.testing.assert_allclose(known, wanted, atol=1e-6)
    assert np.array_equal(act_once(temperature=1.0)[0], plain)


def test_acting_leaves_the_agent_and_the_global_generator_alone():
    owner = shaken("discrete", "transformer").train()
    before, state = {k: v.clone() for k, v in owner.state_dict().items()}, torch.get_rng_state()
    act(AgentPolicy(owner, num_actors=ACTORS, capacity=4), stream(owner), [0] * ACTORS)
    assert owner.training
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(dict(owner.state_dict()), before, rtol=0, atol=0)


@torch.no_grad()
def test_learned_positions_refuse_what_they_have_no_row_for():
    positions = SEQUENCES["transformer"] | {"position": "learned", "max_time": STEPS}
    owner = shaken("discrete", positions)
    source = windows(owner.spaces, lengths=(STEPS, 2), rows=STEPS, terminated=0.0)
    source.start[:] = 0, STEPS - 2  # padding may reach beyond
    owner.encode(TensorBatch.from_numpy(source, owner.spaces))
    source.start[1] += 1
    with pytest.raises(UsageError, match="max_time"):
        owner.encode(TensorBatch.from_numpy(source, owner.spaces))
    policy, tokens = AgentPolicy(owner, num_actors=ACTORS, capacity=4), stream(owner)
    act(policy, tokens, [STEPS - 1, 0, 0, 0])
    given = {n: tokens.columns[n][:, 0] for n in ("obs", "action", "reward")}
    with pytest.raises(UsageError, match="max_time"):
        policy.act({"obs": given["obs"]}, given["action"], given["reward"], np.array([STEPS, 0, 0, 0]))
    prefix = {n: np.repeat(column[:1], STEPS + 1, 0) for n, column in given.items()}
    with pytest.raises(UsageError, match="max_time"):
        policy.rebuild([prefix] * ACTORS)


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_some_actors_act_as_each_would_alone(sequence):
    """Ranges and scattered choices, out of step with each other, past the ends of their rings."""
    owner, rng = shaken("discrete", sequence), np.random.default_rng(0)
    source = stream(owner, seed=1)
    together = AgentPolicy(owner, num_actors=ACTORS, capacity=5, greedy=True)
    alone = [AgentPolicy(owner, num_actors=1, capacity=5, greedy=True) for _ in range(ACTORS)]
    rows = np.zeros(ACTORS, int)
    for _ in range(40):
        chosen = np.flatnonzero(rng.random(ACTORS) < 0.6)
        if not len(chosen):
            continue
        rows[(rows == STEPS) | (rng.random(ACTORS) < 0.1)] = 0
        pick = list(chosen), list(rows[chosen])
        obs = {name: source.columns[name][pick] for name in owner.spaces.observation}
        previous = source.columns["action"][pick], source.columns["reward"][pick]
        actions = together.act_for(chosen, obs, *previous, rows[chosen])
        expected = [act(alone[actor], source, [rows[actor]], [actor])[0] for actor in chosen]
        np.testing.assert_array_equal(actions, expected)
        rows[chosen] += 1


@pytest.mark.parametrize("action", ["discrete", "multi_discrete", "multi_binary"])
def test_an_agent_plays_at_its_own_temperature_and_explores_at_one(action):
    """Of the same weights and draws: at .25, as another agent told to play at .25; a policy that explores, at 1."""
    sharp, plain = (agent(action, actor={"hidden": [16], "temperature": t}) for t in (0.25, 1.0))
    sharp.load_state_dict(plain.state_dict())
    source = stream(plain)

    def draw(owner, **how):
        policy = AgentPolicy(owner, num_actors=ACTORS, capacity=STEPS, seed=3, **how)
        return np.array([act(policy, source, [row] * ACTORS) for row in range(STEPS)])

    np.testing.assert_array_equal(draw(sharp), draw(plain, temperature=0.25))
    np.testing.assert_array_equal(draw(sharp, temperature=4.0), draw(plain))
    np.testing.assert_array_equal(draw(sharp, explores=True), draw(plain))


def test_a_density_has_no_temperature():
    with pytest.raises(UsageError, match=r"temperature needs probabilities.*agent\.actor\.temperature"):
        agent("box", actor={"hidden": [16], "temperature": 0.5})
