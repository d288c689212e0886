"""The same mathematics on a CUDA device: updates, compiled and packed and in bf16, long windows, checkpoints, acting.

pytest -m gpu -n 0 tests
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.config.model import AgentSettings
from pipelines.config.settings import TrainSettings
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.acting import AgentPolicy
from pipelines.nets.compute import autocast
from pipelines.nets.mamba import selective_scan
from pipelines.nets.scan import linear_scan
from pipelines.training.learner import Learner
from tests.learning import factories
from tests.learning.test_devices import SEQUENCES
from tests.tiers import crossed
from tests.training.test_learner import ENCODERS, batch, encoding, learner, uneven

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def without_tf32() -> None:
    """A learner leaves its precision to the process; a test without one has that of the data sheet."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def alike(there: Learner, here: Learner) -> None:
    """Let `there`, on CUDA, draw what `here` draws."""

    def on_cpu() -> tuple[list[torch.Generator], list[int]]:
        generators, seeds = Learner.randomness(there)
        return [torch.Generator().manual_seed(each.initial_seed()) for each in generators], seeds

    there.randomness = on_cpu  # type: ignore[method-assign]


WAYS: list[dict[str, object]] = [
    {},
    {"precision": "tf32"},
    {"packing": True},
    {"activation_checkpointing": True},
    {"precision": "bf16"},
    {"precision": "bf16", "packing": True},
    {"compile": True},
    {"precision": "bf16", "packing": True, "compile": True},
]
MUON = ({"optimizer": "muon"}, "transformer")


@pytest.mark.parametrize(
    ("way", "case"),
    [*crossed(WAYS, list(ENCODERS)), MUON],
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "plain",
)
def test_updates_are_those_of_the_cpu(case: str, way: dict[str, object]) -> None:
    rng = np.random.default_rng(0)
    there = encoding(case, device="cuda", **{"cuda_graphs": False} | way)
    same = {"precision": "float32"} | {name: way[name] for name in ("precision", "optimizer") if name in way}
    here = encoding(case, device="cpu", **same)
    alike(there, here)
    assert there.notices == []
    exact = "precision" not in way
    for _ in range(3):
        data = uneven(rng)
        ours, theirs = there.step(lambda size, data=data: data), here.step(lambda size, data=data: data)
        for name in ("loss", "critic_loss", "q", "grad_norm"):
            close = {"rtol": 1e-3, "atol": 1e-4} if exact else {"rtol": 0.15, "atol": 0.1}
            torch.testing.assert_close(ours[name].cpu(), theirs[name], **close, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("way", "case"),
    [
        *crossed([{}, {"ema_decay": 0.9, "log_every": 2}, {"precision": "bf16"}, {"compile": True}], list(ENCODERS)),
        MUON,
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "plain",
)
def test_an_update_that_is_repeated_as_a_graph_is_the_same(case: str, way: dict[str, object]) -> None:
    rng = np.random.default_rng(0)
    dropout = 0.1 if case.startswith("transformer") else 0.0
    graphs, plain = (encoding(case, dropout=dropout, device="cuda", cuda_graphs=on, **way) for on in (True, False))
    close = {"rtol": 1e-3, "atol": 1e-4} if "precision" not in way else {"rtol": 0.05, "atol": 0.05}
    for update in range(8):
        data = batch(rng, size=8, steps=9)
        data.lengths[:] = 10
        if update == 3:  # another shape
            data.lengths[0] = 4
        if update == 6:  # a gradient that is not finite
            data.columns["reward"][0, 3] = np.inf
        ours, theirs = (each.step(lambda size, data=data: data) for each in (graphs, plain))
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], **close, msg=lambda text, n=name: f"{n}: {text}")
    assert [notice for notice in graphs.notices if "was skipped" not in notice] == []
    assert graphs.graphs is not None
    assert len(graphs.graphs) == 1
    for (name, ours), theirs in zip(graphs.agent.state_dict().items(), plain.agent.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, **close, msg=lambda text, n=name: f"{n}: {text}")
    for ours, theirs in zip(graphs.average, plain.average, strict=True):
        torch.testing.assert_close(ours, theirs, **close)


def test_updates_of_windows_of_all_lengths_are_repeated_as_graphs() -> None:
    rng = np.random.default_rng(0)
    graphs, plain = (encoding("transformer", device="cuda", cuda_graphs=on) for on in (True, False))
    for _ in range(12):
        data = batch(rng, size=8, steps=9)
        data.lengths[:] = rng.integers(2, 11, 8)
        data.lengths[0] = 10
        for column in data.columns.values():
            for row, length in zip(column, data.lengths, strict=True):
                row[length:] = 0
        rounded = graphs.prepare(data, graphs.update)
        ours, theirs = (each.step(lambda size, rounded=rounded: rounded) for each in (graphs, plain))
        for name in ours:
            torch.testing.assert_close(
                ours[name], theirs[name], rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
            )
    assert graphs.notices == []
    assert graphs.graphs is not None
    assert len(graphs.graphs) > 0
    for ours, theirs in zip(graphs.parameters, plain.parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("action", "kind"), crossed(list(factories.ACTIONS), ["actor-critic", "multi-task", "behaviour-cloning"])
)
def test_every_agent_and_action_space_gives_the_loss_of_the_cpu(kind: str, action: str) -> None:
    here = factories.agent(action, kind=kind)
    there = factories.agent(action, kind=kind).to(CUDA)
    source = factories.windows(here.spaces)
    found: list[list[torch.Tensor]] = []
    for agent, device in ((here, "cpu"), (there, "cuda")):
        data = factories.move(source, agent, device)
        loss, _ = agent.loss(data, torch.Generator("cpu").manual_seed(0))
        loss.backward()
        agent.update_targets()
        grads = [p.grad.cpu() for p in agent.trainable_parameters().values() if p.grad is not None]
        found.append([loss.detach().cpu(), *grads])
    # Gradients of densities are differences of large numbers: in float32 a CPU is off by .2% of its own float64.
    for here_too, over_there in zip(*found, strict=True):
        assert (over_there - here_too).norm() < 1e-2 * here_too.norm() + 1e-4


@pytest.mark.parametrize("case", ["transformer", "gru", "mamba"])
def test_bf16_learns_what_is_in_a_batch(case: str) -> None:
    data = batch(np.random.default_rng(0), size=8)
    found = []
    for precision in ("float32", "bf16"):
        trained = encoding(case, device="cuda", precision=precision, learning_rate=3e-3, batch_size=8)
        first, *_, last = [trained.step(lambda size: data)["td_error"].item() for _ in range(150)]
        found.append(last)
        assert last < 0.8 * first
        assert all(parameter.dtype == torch.float32 for parameter in trained.parameters)
    assert found[1] < 1.5 * found[0] + 0.05


@pytest.mark.parametrize("documents", [False, True])
def test_scans_are_those_of_the_cpu_in_float64(documents: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, delta = torch.rand(2, 3, 200, 8, generator=generator)
    rate = -3 * torch.rand(8, 4, generator=generator)
    into, out = torch.randn(2, 3, 200, 4, generator=generator)
    first = torch.randn(3, 8, 4, generator=generator)
    begins = torch.rand(3, 200, generator=generator) < 0.05 if documents else None
    results = []
    for device, dtype in ((CUDA, torch.float32), (torch.device("cpu"), torch.float64)):
        given = [t.to(device, dtype).requires_grad_() for t in (x, delta, rate, into, out, first)]
        y, last = selective_scan(*given, None if begins is None else begins.to(device))
        h = linear_scan((-given[1]).exp(), given[0], given[0][:, 0])
        (y.square().sum() + last.sum() + h.square().sum()).backward()
        results.append([tensor.double().cpu() for tensor in (y, last, h, *(t.grad for t in given))])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


@pytest.mark.parametrize(("name", "precision"), crossed(list(SEQUENCES), ["float32", "bf16"]))
def test_cached_steps_are_the_whole_forward(name: str, precision: str) -> None:
    agent = factories.agent(sequence=SEQUENCES[name]).to(CUDA).eval()
    source = factories.windows(agent.spaces, lengths=(9,) * 4, rows=9)
    source.start[:] = 0
    with torch.no_grad(), autocast(CUDA, precision):
        data = factories.move(source, agent, CUDA)
        whole = agent.heads.actor.acting(agent.encode(data)).float()
    found: list[torch.Tensor] = []
    acting = agent.heads.actor.acting

    def watched(h: torch.Tensor) -> torch.Tensor:
        found.append(acting(h))
        return found[-1]

    agent.heads.actor.acting = watched  # type: ignore[method-assign]
    policy = AgentPolicy(agent, num_actors=4, capacity=9, device=CUDA, precision=precision)
    columns = source.columns
    for t in range(9):
        policy.act({"obs": columns["obs"][:, t]}, columns["action"][:, t], columns["reward"][:, t], np.full(4, t))
    scale = whole.abs().max()
    stepped = torch.stack(found, 1).float()
    assert (stepped - whole).abs().max() < (1e-4 if precision == "float32" else 0.05) * scale
    policy.rebuild([{name: column[i, :8] for name, column in columns.items()} for i in range(4)])
    policy.act({"obs": columns["obs"][:, 8]}, columns["action"][:, 8], columns["reward"][:, 8], np.full(4, 8))
    assert (found[-1].float() - stepped[:, -1]).abs().max() < (1e-4 if precision == "float32" else 0.05) * scale


@pytest.mark.parametrize("sequence", [{"window": 512, "sink": 1}, {"window": 512}, {}, {"kind": "mamba"}], ids=str)
def test_a_window_of_ten_thousand_steps_fits(sequence: dict[str, object]) -> None:
    spaces = factories.agent().spaces
    data = factories.windows(spaces, lengths=(10_001,), rows=10_001, terminated=0.0)
    peaks = []
    for activation_checkpointing in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train = TrainSettings(
            batch_size=1,
            context_length=10_000,
            device="cuda",
            precision="bf16",
            activation_checkpointing=activation_checkpointing,
        )
        trained = Learner(spaces, AgentSettings.model_validate({"sequence": sequence}), train, seed=0)
        assert torch.isfinite(trained.step(lambda size: data)["loss"])
        peaks.append(torch.cuda.max_memory_allocated())
        del trained
    assert max(peaks) < 8 * 1024**3
    assert peaks[1] <= 1.02 * peaks[0]


def test_a_checkpoint_of_cuda_continues_there_and_acts_on_the_cpu(tmp_path: Path) -> None:
    data = batch(np.random.default_rng(0))
    whole, parts = learner(device="cuda", ema_decay=0.9), learner(device="cuda", ema_decay=0.9)
    for _ in range(4):
        whole.step(lambda size: data)
    for _ in range(2):
        parts.step(lambda size: data)
    parts.save(tmp_path, {"env": {}})
    again = learner(device="cuda", ema_decay=0.9)
    again.restore(checkpoints.load(tmp_path))
    assert again.notices == []
    for _ in range(2):
        again.step(lambda size: data)
    for a, b in zip(whole.parameters, again.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    observation, none = {"obs": np.zeros((3, 3), np.float32)}, np.zeros(3, np.float32)
    actions = []
    for device in ("cuda", "cpu"):
        agent = again.agent.to(device).eval()
        policy = AgentPolicy(agent, num_actors=3, capacity=5, greedy=True, device=device)
        actions.append(policy.act(observation, np.zeros(3, np.int32), none, np.zeros(3, np.int64)))
    np.testing.assert_array_equal(*actions)


@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_goes_on_on_the_other_device(tmp_path: Path, first: str, then: str) -> None:
    data = batch(np.random.default_rng(0))
    whole, parts, again = (learner(device=device, ema_decay=0.9) for device in (first, first, then))
    for trained in (whole, parts):
        trained.step(lambda size: data)
    parts.save(tmp_path, {"env": {}})
    again.restore(checkpoints.load(tmp_path))
    assert [("another kind of device" in text) for text in again.notices] == [True]
    for group in (
        again.parameters,
        again.average,
        *(s.values() for s in again.optimizer.state_dict()["state"].values()),
    ):
        assert {tensor.device.type for tensor in group} == {then}
    alike(*((whole, again) if first == "cuda" else (again, whole)))
    ours, theirs = again.step(lambda size: data), whole.step(lambda size: data)
    torch.testing.assert_close(ours["loss"].cpu(), theirs["loss"].cpu(), rtol=1e-3, atol=1e-4)
    for a, b in zip(again.parameters, whole.parameters, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-2, atol=2e-4)


@pytest.mark.parametrize("switches", [{}, {"precision": "bf16", "compile": True, "packing": True}], ids=str)
def test_the_benchmark_reports_the_share_of_the_rate(switches: dict[str, object]) -> None:
    from tests.benchmarks import train_cuda

    peak = train_cuda.product_rate(CUDA, torch.bfloat16)
    row = {"attention": "auto", "train": switches, "uneven": "packing" in switches}
    figures = train_cuda.measure(row, device=CUDA, peak=peak, batch=8, length=256, updates=3)
    assert 0 < figures["MFU"] < 1
    assert 0 < figures["peak GB"] < 8
    assert figures["notices"] == []
    assert figures["computes with"]["compiled"] == ("compile" in switches)


def test_an_update_that_cannot_be_recorded_is_computed_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batch(np.random.default_rng(0))
    ours, theirs = learner(device="cuda", cuda_graphs=True), learner(device="cuda")
    clip = ours._clip

    def wait() -> dict[str, torch.Tensor]:
        found = clip()
        float(found["grad_norm"])  # which a recording does not allow
        return found

    monkeypatch.setattr(ours, "_clip", wait)
    for _ in range(4):
        ours.step(lambda size: data)
        theirs.step(lambda size: data)
    (notice,) = ours.notices
    assert "train.cuda_graphs: cannot record an update (" in notice
    assert "captur" in notice  # the reason, not that the recording ended badly
    for a, b in zip(ours.parameters, theirs.parameters, strict=True):
        torch.testing.assert_close(a, b)
