"""The learner: schedules by hand, gradients of micro-batches, nothing but finite updates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.data.batch import Batch
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.batch import TensorBatch
from pipelines.learning.checkpoint import resolve_device
from pipelines.training.learner import Learner
from tests.stages.recipes import tiny
from tests.tiers import some

SPACES = Spaces(observation={"obs": Box(shape=(3,))}, action=Discrete(n=4))


def batch(rng: np.random.Generator, size: int = 4, steps: int = 5) -> Batch:
    columns = Schema(SPACES).empty(size * (steps + 1))
    columns = {name: column.reshape(size, steps + 1, *column.shape[1:]) for name, column in columns.items()}
    columns["obs"] = rng.normal(size=(size, steps + 1, 3)).astype(np.float32)
    columns["reward"] = rng.normal(size=(size, steps + 1)).astype(np.float32)
    columns["action"] = rng.integers(4, size=(size, steps + 1)).astype(np.int32)
    return Batch(columns=columns, lengths=rng.integers(2, steps + 2, size=size), start=np.zeros(size, dtype=np.int64))


def learner(**train: object) -> Learner:
    settings = tiny(train={"precision": "float32"} | train, agent={"sequence": {"dropout": 0.0}})
    return Learner(SPACES, settings.agent, settings.train, seed=3)


@pytest.mark.parametrize(
    "agent", [{"actor_weight": 0.0, "bc_weight": 0.0}, {"kind": "behaviour-cloning", "bc_weight": 0.0}], ids=str
)
def test_an_agent_whose_policy_nothing_teaches_is_refused(agent: dict[str, object]) -> None:
    settings = tiny(agent=agent)
    with pytest.raises(UsageError, match=r"nothing teaches the policy: agent\.actor_weight and"):
        Learner(SPACES, settings.agent, settings.train, seed=3)
    near = settings.agent.model_copy(update={"reference": "runs/teacher"})
    Learner(SPACES, near, settings.train, seed=3)


def sharing_noise(owner: Learner) -> Learner:
    """Let micro-batches draw from one generator: together they draw what the whole batch does."""

    def shared() -> tuple[list[torch.Generator], list[int]]:
        generators, seeds = Learner.randomness(owner)
        return generators[:1] * len(generators), seeds[:1] * len(seeds)

    owner.randomness = shared  # type: ignore[method-assign]
    return owner


def test_micro_batches_add_up_to_the_batch() -> None:
    rng = np.random.default_rng(0)
    whole = batch(rng, size=4)
    halves = [
        Batch(
            columns={k: v[part] for k, v in whole.columns.items()}, lengths=whole.lengths[part], start=whole.start[part]
        )
        for part in (slice(0, 2), slice(2, 4))
    ]
    one, two = learner(), sharing_noise(learner(grad_accumulation=2))
    for _ in range(3):
        one.step(lambda size: whole)
        parts = iter(halves)
        two.step(lambda size, parts=parts: next(parts))
    for (name, a), b in zip(one.agent.state_dict().items(), two.agent.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    assert one.steps_seen == two.steps_seen == 3 * int((whole.lengths - 1).sum())


def test_the_entropy_bonus_falls_with_the_updates() -> None:
    drawn = batch(np.random.default_rng(0))

    def entropy_losses(weight: float, **train: object) -> list[float]:
        settings = tiny(train={"learning_rate": 1e-9, **train}, agent={"entropy_weight": weight})
        owner = Learner(SPACES, settings.agent, settings.train, seed=3)
        return [owner.step(lambda size: drawn)["entropy_loss"].item() for _ in range(5)]

    [whole, *_] = entropy_losses(0.4)
    expected = [whole * share for share in (1, 0.75, 0.5, 0.25, 0)]
    np.testing.assert_allclose(entropy_losses(0.4, entropy_decay_steps=4), expected, rtol=1e-3)
    with pytest.raises(UsageError) as caught:
        entropy_losses(0.0, entropy_decay_steps=4)
    assert "needs a number above 0 as agent.entropy_weight" in caught.value.problems[0]


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UsageError, match="multiple"):
        learner(grad_accumulation=3)
    for nonsense in ("tpu-please", "meta"):
        with pytest.raises(UsageError):
            resolve_device(nonsense)
    with pytest.raises(InputMissing, match="found"):
        resolve_device(f"cuda:{torch.cuda.device_count()}")


def test_draws_are_keyed_by_update_and_micro_batch() -> None:
    """Nothing else determines them: neither earlier draws nor torch's global generator."""
    one, two = learner(grad_accumulation=2), learner(grad_accumulation=4)
    one.update = two.update = 7
    torch.manual_seed(1)
    (a, b), dropout = one.randomness()
    torch.manual_seed(2)
    (again, *_), same = two.randomness()
    first = torch.rand(4, generator=a)
    assert torch.equal(first, torch.rand(4, generator=again))
    assert not torch.equal(first, torch.rand(4, generator=b))
    assert dropout == same[:2]
    two.update = 8
    assert len({*same, *two.randomness()[1]}) == 8


def test_an_update_depends_on_nothing_but_its_key() -> None:
    """Dropout included, and whatever was drawn before."""
    data = batch(np.random.default_rng(0))
    one, two = (encoding("feedforward", dropout=0.3) for _ in range(2))
    torch.rand(100)
    one.step(lambda size: data)
    torch.manual_seed(99)
    two.step(lambda size: data)
    for a, b in zip(one.parameters, two.parameters, strict=True):
        assert torch.equal(a, b)


def test_a_micro_batch_has_the_same_dropout_when_it_is_encoded_again() -> None:
    """An update of several micro-batches encodes each twice: for the statistics, and for the loss."""
    owner, states = encoding("feedforward", dropout=0.3, grad_accumulation=2), []
    encode = owner.agent.encode
    owner.agent.encode = lambda data: states.append(encode(data)) or states[-1]  # type: ignore[method-assign]
    data = batch(np.random.default_rng(0))
    owner.step(lambda size: data)
    first, second, first_again, second_again = states
    assert torch.equal(first, first_again)
    assert torch.equal(second, second_again)
    assert not torch.equal(first, second)  # the same windows


ENCODERS: dict[str, dict[str, object]] = {
    "transformer": {},
    "transformer-window": {"window": 3, "sink": 1},
    "gru": {"kind": "gru", "hidden": 8, "output": 8},
    "mingru": {"kind": "mingru", "d_model": 8, "num_layers": 1},
    "mamba": {"kind": "mamba", "d_model": 8, "num_layers": 1, "state": 4},
    "feedforward": {"kind": "feedforward", "d_model": 8, "num_layers": 1, "d_ff": 8, "dropout": 0},
    "identity": {"kind": "identity"},
}


def encoding(case: str, *, dropout: float = 0.0, **train: object) -> Learner:
    """A learner whose sequence encoder is that of the case."""
    settings = tiny(train={"precision": "float32"} | train)
    base = {**settings.agent.sequence.model_dump(), "dropout": 0.0} if case.startswith("transformer") else {}
    kind = ENCODERS[case] | ({"dropout": dropout} if dropout else {})
    agent = {**settings.agent.model_dump(), "sequence": base | kind}
    return Learner(SPACES, settings.agent.model_validate(agent), settings.train, seed=3)


def uneven(rng: np.random.Generator, size: int = 8) -> Batch:
    """Windows of very different lengths, whose padding holds nonsense."""
    data = batch(rng, size=size, steps=9)
    data.lengths[:] = [10, 2, 3, 5, 2, 7, 2, 3][:size]
    for column in data.columns.values():
        for row, length in zip(column, data.lengths, strict=True):
            row[length:] = 0
    return data


@pytest.mark.parametrize("case", ENCODERS)
def test_packed_windows_give_the_update_of_padded_ones(case: str) -> None:
    data = uneven(np.random.default_rng(0))
    padded, packed = encoding(case), encoding(case, packing=True)
    rows: list[int] = []
    packed.agent.timestep.register_forward_hook(lambda _, __, out: rows.append(len(out)))
    ours, theirs = (learner.step(lambda size: data) for learner in (packed, padded))
    assert rows[0] == 4  # 34 tokens in rows of 10
    assert ours["loss"].item() == pytest.approx(theirs["loss"].item(), rel=1e-5)
    assert ours["grad_norm"].item() == pytest.approx(theirs["grad_norm"].item(), rel=1e-4)


@pytest.mark.parametrize("case", ENCODERS)
def test_every_encoder_learns_in_bf16(case: str) -> None:
    data = batch(np.random.default_rng(0), size=4)
    full, half = encoding(case), encoding(case, precision="bf16")
    for _ in range(3):
        expected, actual = full.step(lambda size: data), half.step(lambda size: data)
        assert actual["loss"].item() == pytest.approx(expected["loss"].item(), rel=0.05)
    assert all(parameter.dtype == torch.float32 for parameter in half.agent.parameters())


def test_micro_batches_add_up_in_bf16_too() -> None:
    whole = batch(np.random.default_rng(0), size=4)
    halves = [
        Batch(
            columns={k: v[part] for k, v in whole.columns.items()}, lengths=whole.lengths[part], start=whole.start[part]
        )
        for part in (slice(0, 2), slice(2, 4))
    ]
    one, two = learner(precision="bf16"), learner(precision="bf16", grad_accumulation=2)
    parts = iter(halves)
    expected, actual = one.step(lambda size: whole), two.step(lambda size: next(parts))
    for part in ("timestep", "sequence", "actor", "critic"):  # a cast kept from a pass without gradient would lose it
        name = f"grad_norm_{part}"
        assert actual[name].item() == pytest.approx(expected[name].item(), rel=0.05), name


@pytest.mark.parametrize("switch", some(["activation_checkpointing", "compile"], 0))
def test_switches_of_speed_change_no_loss(switch: str) -> None:
    data = batch(np.random.default_rng(0))
    plain, other = learner(), learner(**{switch: True})
    assert other.notices == []
    for _ in range(2):
        expected, actual = plain.step(lambda size: data), other.step(lambda size: data)
        assert actual["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-4)
    assert plain.agent.state_dict().keys() == other.agent.state_dict().keys()


def test_without_a_compiler_one_notice_is_given_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no g++ here\nand more")

    monkeypatch.setattr(torch, "compile", refuse)
    trained = learner(compile=True)
    assert trained.notices == ["train.compile: cannot compile here (RuntimeError: no g++ here); going on without"]
    assert not trained.describe()["compiled"]
    trained.step(lambda size: batch(np.random.default_rng(0)))


def test_the_norms_of_parts_add_up_to_that_of_the_whole() -> None:
    metrics = learner().step(lambda size: batch(np.random.default_rng(0)))
    parts = [value for name, value in metrics.items() if name.startswith("grad_norm_")]
    assert len(parts) == 4
    assert torch.stack(parts).norm().item() == pytest.approx(metrics["grad_norm"].item(), rel=1e-5)


def test_encoders_are_looked_at_for_every_fourth_line_of_the_log() -> None:
    data = batch(np.random.default_rng(0))
    watched, plain = learner(log_every=1), learner(log_every=100)
    found = [watched.step(lambda size: data) for _ in range(8)]
    names = {"attention_entropy", "dead_units_timestep", "dead_units_sequence"}
    assert [names <= metrics.keys() for metrics in found] == [False, False, False, True] * 2
    for metrics in found[3::4]:
        assert 0 <= metrics["attention_entropy"] <= np.log(6)
        assert 0 <= metrics["dead_units_timestep"] <= 1
    for _ in range(8):
        plain.step(lambda size: data)
    for a, b in zip(watched.parameters, plain.parameters, strict=True):
        assert torch.equal(a, b)  # looking changes nothing


def test_a_record_says_what_is_computed_with() -> None:
    assert learner().describe() == {
        "device": "cpu", "precision": "float32", "compiled": False, "attention": "sdpa",
    }  # fmt: skip
    assert encoding("transformer-window", context_length=64).describe()["attention"] == "banded"
    assert "attention" not in encoding("gru").describe()


@pytest.mark.parametrize("kind", ["actor-critic", "multi-task", "behaviour-cloning"])
def test_every_agent_continues_from_a_checkpoint_to_the_bit(tmp_path: Path, kind: str) -> None:
    def fresh() -> Learner:
        settings = tiny(agent={"kind": kind, "sequence": {"dropout": 0.1}})
        return Learner(SPACES, settings.agent, settings.train, seed=3)

    rng = np.random.default_rng(0)
    data = [batch(rng) for _ in range(4)]
    whole = fresh()
    for windows in data:
        whole.step(lambda size, windows=windows: windows)
    first = fresh()
    for windows in data[:2]:
        first.step(lambda size, windows=windows: windows)
    first.save(tmp_path, {"env": {}})
    torch.manual_seed(77)
    again = fresh()
    again.restore(checkpoints.load(tmp_path))
    for windows in data[2:]:
        again.step(lambda size, windows=windows: windows)
    for (name, ours), theirs in zip(again.agent.state_dict().items(), whole.agent.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def steps_that_count(states: torch.Tensor, data: TensorBatch, mask: torch.Tensor) -> torch.Tensor:
    return mask.sum().expand(mask.shape)


def test_warm_up_and_the_mask_column_reach_the_loss() -> None:
    spaces = Spaces(observation={**SPACES.observation, "obs.counts": Discrete(n=2)}, action=SPACES.action)
    data = batch(np.random.default_rng(0), steps=5)
    data.lengths[:], data.start[:] = 6, 2
    columns = {**data.columns, "obs.counts": np.tile(np.array([0, 1, 0, 0, 1, 1], np.int32), (4, 1))}

    def counted(burn_in: int = 0, **train: object) -> float:
        warm_up = np.full(4, burn_in)
        drawn = Batch(columns=columns, lengths=data.lengths, start=data.start, warm_up=warm_up)
        settings = tiny(train=train, agent={"auxiliary_losses": [{"kind": f"{__name__}:steps_that_count"}]})
        return (
            Learner(spaces, settings.agent, settings.train, seed=3).step(lambda size: drawn)["auxiliary_loss_0"].item()
        )

    assert counted() == 4 * 5
    assert counted(burn_in=2) == 4 * 3
    assert counted(loss_mask="obs.counts") == 4 * 2
    assert counted(loss_mask="obs.counts", burn_in=2) == 4 * 1


def test_the_actor_mask_reaches_the_policy_alone() -> None:
    spaces = Spaces(observation={**SPACES.observation, "obs.taught": Discrete(n=2)}, action=SPACES.action)
    data = batch(np.random.default_rng(0), steps=5)
    drawn = Batch(
        columns={**data.columns, "obs.taught": np.zeros((4, 6), np.int32)}, lengths=data.lengths, start=data.start
    )
    first, second = (
        Learner(spaces, (settings := tiny(train=train)).agent, settings.train, seed=3).step(lambda size: drawn)
        for train in ({}, {"actor_mask": "obs.taught"})
    )
    assert (first["actor_loss"].item() != 0, second["actor_loss"].item()) == (True, 0.0)
    assert second["critic_loss"].item() == first["critic_loss"].item()


def test_masks_that_cannot_work_are_refused() -> None:
    for setting in ("loss_mask", "actor_mask"):
        with pytest.raises(UsageError, match=rf"train\.{setting} 'obs\.other' is not an observation"):
            learner(**{setting: "obs.other"})
    with pytest.raises(UsageError) as refused:
        learner(burn_in=5)
    assert "burn_in 5 leaves no step of a window of 5" in refused.value.problems[0]


def test_another_kind_of_device_is_reported(tmp_path: Path) -> None:
    """Its generators draw other numbers from the same seeds."""
    before, after = learner(), learner()
    before.device = torch.device("cuda")
    before.save(tmp_path, {"env": {}})
    after.restore(checkpoints.load(tmp_path))
    assert ["another kind of device" in text for text in after.notices] == [True]
    after.save(tmp_path, {"env": {}})
    again = learner()
    again.restore(checkpoints.load(tmp_path))
    assert again.notices == []
