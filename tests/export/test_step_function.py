"""The step function acts as the agent does in evaluations, with its own memories, whatever it is made of."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.errors import UsageError
from pipelines.export import forms, parity
from pipelines.export.assets import policy as runtime
from pipelines.export.step_function import StepFunction
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Ragged, Space, Spaces
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.agent import Agent
from pipelines.learning.bundle import FORMAT, VERSION
from pipelines.nets.actor import invert_erf
from pipelines.nets.linear import SigmaLinear, fold
from tests.learning.factories import ACTIONS, agent, values
from tests.tiers import some

N, STEPS, CAPACITY = 3, 40, 10
TRANSFORMER = {"kind": "transformer", "d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 32, "dropout": 0}
MIXED: dict[str, Space] = {
    "image": Box(shape=(16, 16, 3), dtype="uint8"),
    "numbers": Box(shape=(3,)),
    "choice": Discrete(n=3),
    "choices": MultiDiscrete(nvec=(2, 3)),
    "bits": MultiBinary(n=3),
}
TOKENS: dict[str, Space] = {"text": MultiDiscrete(nvec=(9,) * 6), "obs": Box(shape=(3,))}
LEGAL: dict[str, Space] = {"obs": Box(shape=(3,)), "legal": MultiBinary(n=4)}
CASES: dict[str, dict[str, Any]] = {
    "transformer": {"sequence": TRANSFORMER},
    "window": {"sequence": TRANSFORMER | {"position": "rope", "window": 6, "sink": 2}},
    "both": {"sequence": TRANSFORMER | {"position": "both"}},
    "learned": {"sequence": TRANSFORMER | {"position": "learned", "max_time": 64, "logit_clip": 5.0, "norm": "rms"}},
    "gru": {"sequence": {"kind": "gru", "num_layers": 2, "hidden": 12, "output": 10}},
    "mingru": {"sequence": {"kind": "mingru", "d_model": 16, "num_layers": 2}},
    "mamba": {"sequence": {"kind": "mamba", "d_model": 16, "num_layers": 2}},
    "feedforward": {"sequence": {"kind": "feedforward", "d_model": 12, "num_layers": 1, "d_ff": 16, "dropout": 0}},
    "identity": {"sequence": {"kind": "identity"}},
    **{name: {"action": name} for name in ACTIONS if name != "discrete"},
    "beta": {"action": "box", "actor": {"hidden": [16], "distribution": "beta"}},
    "mixture": {"action": "box", "actor": {"hidden": [16], "distribution": "gaussian-mixture"}},
    "grid": {"action": "box", "actor": {"hidden": [16], "distribution": "grid"}},
    "gumbel": {"actor": {"hidden": [16], "gumbel": True}},
    "sharp": {"actor": {"hidden": [16], "temperature": 0.25}},
    "sharp-choices": {"action": "multi_discrete", "actor": {"hidden": [16], "temperature": 0.25}},
    "shortcut": {"action": "box", "shortcut": True},
    "mixed": {"observation": MIXED},
    "impala": {"observation": MIXED, "timestep": {"hidden": [16], "output": 12, "image": {"kind": "impala"}}},
    "tokens": {
        "observation": TOKENS,
        "timestep": {"hidden": [16], "output": 12, "columns": {"text": "tokens"}},
    },
    "legal": {"observation": LEGAL, "action_mask": "legal"},
    "shown": {
        "action": "box",
        "actor": {"hidden": [16], "columns": ["obs"]},
        "timestep": {"hidden": [16], "output": 12, "symlog": True},
    },
}


def made(name: str) -> Agent:
    """Return an agent whose action parameters are of the size of trained ones, with statistics of inputs."""
    found = agent(**{"sequence": CASES["gru"]["sequence"], **CASES[name]})
    with torch.no_grad():
        found.heads.actor.net.last.weight.mul_(100)
        for module in found.modules():
            if isinstance(module, SigmaLinear):
                module.gain.fill_(1.7)
    return found.eval()


def recording(owner: Agent) -> parity.Arrays:
    """Return random steps with resets at different times, answered by the agent as it acts in evaluations."""
    rng, spaces, head = np.random.default_rng(0), owner.spaces, owner.make_player()
    policy = AgentPolicy(owner, num_actors=N, capacity=CAPACITY)
    rows, time = [], np.zeros(N, np.int64)
    for step in range(STEPS):
        reset = (rng.random(N) < 0.1) | (step == 0)
        time = np.where(reset, 0, time + 1)
        columns = {name: np.asarray(values(space, (N,), rng)) for name, space in spaces.observation.items()}
        action, reward = np.asarray(values(spaces.action, (N,), rng)), rng.normal(size=N).astype(np.float32)
        before = np.where(reset.reshape(-1, *[1] * (action.ndim - 1)), 0, action).astype(action.dtype)
        params, legal = policy.parameters(columns, before, np.where(reset, 0, reward).astype(np.float32), time)
        noise = rng.random((N, head.noise_size), np.float32)
        rows.append(
            {
                **{f"observation.{name}": column for name, column in columns.items()},
                **{"action": action, "reward": reward, "reset": reset, "noise": noise, "parameters": params.numpy()},
                "greedy": head.to_stored(head.mode(params, legal)).numpy(),
                "sampled": head.to_stored(head.sample(params, torch.from_numpy(noise), legal)).numpy(),
            }
        )
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_acting(name: str) -> None:
    owner = made(name)
    function = StepFunction(owner, capacity=CAPACITY)
    memory = function.empty(N)

    def step(columns: parity.Arrays, *rest: np.ndarray) -> dict[str, np.ndarray]:
        nonlocal memory
        given = (torch.from_numpy(np.ascontiguousarray(value)) for value in rest)
        with torch.no_grad():
            found = function({n: torch.from_numpy(column) for n, column in columns.items()}, *given, memory)
        memory = found[3]
        return dict(zip(("greedy", "sampled", "parameters"), (part.numpy() for part in found[:3]), strict=True))

    recorded = recording(owner)
    assert np.ptp(recorded["parameters"]) > 0.5
    agreement = parity.compare(recorded, step)
    assert agreement.greatest_difference < 1e-5
    assert (agreement.equal_greedy, agreement.equal_sampled) == (1.0, 1.0)
    assert agreement.resets > N


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full) for name in CASES])
def test_every_form_equals_acting(name: str) -> None:
    pytest.importorskip("onnxruntime")
    owner = made(name)
    function = StepFunction(owner, capacity=CAPACITY)
    files = forms.make_files(function, (forms.ONNX, forms.TORCH))
    record = {
        "format": FORMAT,
        "version": VERSION,
        "greedy": True,
        "spaces": owner.spaces.to_json(),
        **forms.describe_step(function),
    }
    recorded = recording(owner)
    for form in (forms.ONNX, forms.TORCH):
        found = parity.compare(recorded, forms.open_form(form, files[forms.FILES[form]], record, N))
        assert found.greatest_difference <= parity.TOLERANCE, form
        assert (found.equal_greedy, found.equal_sampled) == (1.0, 1.0), form
    one = forms.open_form(forms.ONNX, files[forms.FILES[forms.ONNX]], record, 1)
    alone = {key: rows[:, :1] for key, rows in recorded.items()}
    assert parity.compare(alone, one).greatest_difference <= parity.TOLERANCE


@pytest.mark.full
def test_the_length_of_texts_does_not_make_a_graph_larger() -> None:
    """One recurrence over a text, and no operator of this package in what leaves it."""
    onnx = pytest.importorskip("onnx")
    sizes = []
    for places in (4, 40):
        observation = TOKENS | {"text": MultiDiscrete(nvec=(9,) * places)}
        function = StepFunction(agent(**CASES["tokens"] | {"observation": observation}).eval(), capacity=CAPACITY)
        files = forms.make_files(function, (forms.ONNX, forms.TORCH))
        nodes = [node.op_type for node in onnx.load_from_string(files[forms.FILES[forms.ONNX]]).graph.node]
        assert nodes.count("GRU") == 1
        sizes.append(len(nodes))
        with zipfile.ZipFile(io.BytesIO(files[forms.FILES[forms.TORCH]])) as parts:
            assert not any(b"amago" in parts.read(name) for name in parts.namelist())
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("large", [True, False])
def test_a_ring_is_written_in_place_where_it_is_large(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a graph made by hand: it takes the reward from its only ring, and says what it was."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = make.make_graph(
        [
            make.make_node("Sub", ["memory.keys.0", "reward"], ["next.keys.0"]),
            make.make_node("Identity", ["next.keys.0"], ["greedy"]),
        ],
        "g",
        [make.make_tensor_value_info(given, kind, [N]) for given in ("memory.keys.0", "reward")],
        [make.make_tensor_value_info(found, kind, [N]) for found in ("next.keys.0", "greedy")],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 20)], ir_version=10).SerializeToString()
    spaces = Spaces(observation={}, action=Box(shape=())).to_json()
    record = {"spaces": spaces, "memory": {"keys.0": ([], "float32")}, "noise": 1, "max_time": None}
    policy = runtime.OnnxPolicy(given=(record, model), actors=N, greedy=True)
    ring = policy.memory["keys.0"]
    monkeypatch.setattr(runtime, "LARGE", ring.nbytes - large)
    for reward in (np.arange(N, dtype=np.float32), np.ones(N, np.float32)):
        found = policy.step({}, None, reward, np.zeros(N, bool))
        assert (policy.memory["keys.0"] is ring) == large
    np.testing.assert_array_equal(policy.memory["keys.0"], [-1, -2, -3])
    np.testing.assert_array_equal(found["greedy"], [-1, -2, -3])


@pytest.mark.full
@pytest.mark.parametrize("name", ["transformer", "window"])
def test_large_rings_are_written_in_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(runtime, "LARGE", 0)
    owner = made(name)
    function = StepFunction(owner, capacity=CAPACITY)
    content = forms.make_files(function, (forms.ONNX,))[forms.FILES[forms.ONNX]]
    record = {"greedy": True, "spaces": owner.spaces.to_json(), **forms.describe_step(function)}
    policy = runtime.OnnxPolicy(given=(record, content), actors=N)
    rings = {key: values for key, values in policy.memory.items() if key.startswith(("keys", "values"))}
    assert len(rings) == 4
    agreement = parity.compare(recording(owner), policy.step)
    assert agreement.greatest_difference <= parity.TOLERANCE
    assert (agreement.equal_greedy, agreement.equal_sampled) == (1.0, 1.0)
    assert all(policy.memory[key] is values and values.any() for key, values in rings.items())


def test_a_form_that_acts_otherwise_is_found() -> None:
    owner = made("gru")
    recorded = recording(owner)
    other = {**recorded, "parameters": recorded["parameters"] + np.float32(2e-4)}
    answers = iter(range(STEPS))

    def replayed(*_: Any) -> dict[str, np.ndarray]:
        t = next(answers)
        return {name: recorded[name][t] for name in ("greedy", "sampled", "parameters")}

    agreement = parity.compare(other, replayed)
    assert not agreement.holds
    with pytest.raises(Exception, match="does not act as the policy"):
        parity.require({"onnx": agreement})


def test_folding_keeps_the_function() -> None:
    layer = SigmaLinear(5, 7)
    inputs = torch.randn(9, 5)
    expected = layer(inputs)
    plain = fold(torch.nn.Sequential(layer))
    assert type(plain[0]) is torch.nn.Linear
    torch.testing.assert_close(plain(inputs), expected)


def test_the_inverse_error_function_is_that_of_torch() -> None:
    x = torch.linspace(-1 + 1e-6, 1 - 1e-6, 200_001)
    torch.testing.assert_close(invert_erf(x), torch.erfinv(x), rtol=1e-6, atol=1e-7)


def test_a_memory_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = made("gru")
    monkeypatch.setattr(owner.sequence, "memory", lambda **_: object())
    with pytest.raises(UsageError, match="cannot be exported"):
        StepFunction(owner, capacity=4)


@pytest.mark.parametrize("text", some([True, False], 0))
def test_sequences_of_any_length_are_columns(text: bool) -> None:
    space = Ragged(max_length=4, dtype="uint32" if text else "float32", text=text)
    spaces: dict[str, Space] = {"obs.words": space, "obs.words.length": space.length_space}
    owner = agent(observation=spaces, sequence=CASES["gru"]["sequence"]).eval()
    assert set(StepFunction(owner, capacity=4).spaces.observation) == set(spaces)
