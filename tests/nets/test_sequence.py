"""The contract of every sequence encoder: whole windows and cached steps are the same function."""

import math
from itertools import pairwise

import pytest
import torch
from pydantic import TypeAdapter

from pipelines.config.model import SEQUENCE_ENCODERS, SequenceSettings
from pipelines.errors import UsageError
from pipelines.nets.packing import Packing
from pipelines.nets.sequence import make_sequence_encoder
from pipelines.nets.transformer import Sinusoid
from tests.tiers import crossed

INPUT, ACTORS, STEPS = 6, 5, 24
TRANSFORMER = {"kind": "transformer", "d_model": 16, "num_layers": 2, "num_heads": 4, "d_ff": 32}
CASES = {
    "transformer": TRANSFORMER,
    "transformer-dense": TRANSFORMER | {"attention": "dense"},
    "transformer-learned": TRANSFORMER | {"position": "learned", "max_time": STEPS},
    "transformer-rope": TRANSFORMER | {"position": "rope"},
    "transformer-both": TRANSFORMER | {"position": "both"},
    "transformer-window": TRANSFORMER | {"window": 5},
    "transformer-sink": TRANSFORMER | {"window": 4, "sink": 2},
    "transformer-banded": TRANSFORMER | {"window": 3, "sink": 1, "attention": "banded"},
    "transformer-clip": TRANSFORMER | {"logit_clip": 0.5, "position": "rope", "window": 6},
    "transformer-plain": TRANSFORMER | {"normformer": False, "sigma_reparam": False, "head_scale": False},
    "transformer-dropout": TRANSFORMER | {"dropout_attention": 0.3, "dropout_qkv": 0.3},
    "transformer-silu": TRANSFORMER | {"activation": "silu"},
    "transformer-rms": TRANSFORMER | {"norm": "rms"},
    "gru": {"kind": "gru", "num_layers": 2, "hidden": 12, "output": 10},
    "mingru": {"kind": "mingru", "d_model": 12, "num_layers": 2},
    "mamba": {"kind": "mamba", "d_model": 12, "num_layers": 2, "state": 4, "conv": 3},
    "mamba-layer-norm": {"kind": "mamba", "d_model": 12, "num_layers": 1, "state": 4, "norm": "layer"},
    "mamba-no-convolution": {"kind": "mamba", "d_model": 12, "num_layers": 1, "conv": 1},
    "feedforward": {"kind": "feedforward", "d_model": 12, "num_layers": 2, "d_ff": 20},
    "feedforward-plain": {"kind": "feedforward", "d_model": 12, "norm": "none", "dropout": 0.2},
    "identity": {"kind": "identity"},
}


def build(case):
    torch.manual_seed(0)
    encoder = make_sequence_encoder(INPUT, TypeAdapter(SequenceSettings).validate_python(CASES[case]))
    for parameter in encoder.parameters():  # away from the start, where norms and gains are one
        parameter.data += 0.1 * torch.randn_like(parameter)
    return encoder


def test_every_built_in_is_under_this_contract():
    assert {case["kind"] for case in CASES.values()} == set(SEQUENCE_ENCODERS.names())


def episodes(seed=0):
    """For each actor the start steps of its episodes: staggered, some reset together, some alone."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(STEPS, ACTORS, generator=generator) < 0.12
    starts[0] = True
    starts[7, 1:3] = True
    starts[:, 0] = False
    starts[0, 0] = True  # one actor never resets, so windows slide
    return starts


def stepped(encoder, x_STD, starts, capacity):
    memory = encoder.memory(num_actors=ACTORS, capacity=capacity)
    time = torch.zeros(ACTORS, dtype=torch.int64)
    out = []
    for x_ND, start in zip(x_STD, starts, strict=True):
        time = torch.where(start, 0, time)
        if start.any():
            memory.reset(start)
        out.append(encoder.step(x_ND, time, memory))
        time = time + 1
    return torch.stack(out)


def whole(encoder, x_STD, starts):
    """Each episode by itself through one full forward."""
    out = torch.empty(STEPS, ACTORS, encoder.output_size)
    for actor in range(ACTORS):
        bounds = [*starts[:, actor].nonzero()[:, 0].tolist(), STEPS]
        for first, last in pairwise(bounds):
            x = x_STD[first:last, actor][None]
            out[first:last, actor] = encoder(x, torch.arange(last - first)[None])[0]
    return out


@pytest.mark.parametrize(("case", "training"), crossed([*CASES], [False, True]))
@torch.no_grad()
def test_cached_steps_equal_the_full_forward_with_staggered_actors(case, training):
    encoder, starts = build(case), episodes()
    x = torch.randn(STEPS, ACTORS, INPUT)
    expected = whole(encoder.eval(), x, starts)
    actual = stepped(encoder.train(training), x, starts, capacity=STEPS)  # dropout never acts in a step
    torch.testing.assert_close(actual, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("transformer")])
@torch.no_grad()
def test_a_full_cache_equals_windowed_attention(case):
    encoder, starts, capacity = build(case).eval(), episodes(), 4
    x = torch.randn(STEPS, ACTORS, INPUT)
    actual = stepped(encoder, x, starts, capacity)
    window = min(encoder.settings.window or capacity, capacity - encoder.settings.sink)
    encoder.settings = encoder.settings.model_copy(update={"window": window})
    torch.testing.assert_close(actual, whole(encoder, x, starts), atol=5e-5, rtol=0)


@pytest.mark.parametrize(("case", "capacity"), crossed([*CASES], [4, STEPS]))
@torch.no_grad()
def test_prefill_leaves_what_steps_would(case, capacity):
    encoder = build(case).eval()
    lengths = torch.tensor([0, 1, 3, 9, 12])
    x = torch.randn(ACTORS, 14, INPUT)
    time = torch.arange(14).expand(ACTORS, -1)
    filled = encoder.memory(num_actors=ACTORS, capacity=capacity)
    encoder.prefill(x[:, :12], time[:, :12], lengths, filled)
    for actor, length in enumerate(lengths.tolist()):
        alone = encoder.memory(num_actors=1, capacity=capacity)
        for t in range(length):
            encoder.step(x[actor : actor + 1, t], time[:1, t], alone)
        expected = encoder.step(x[actor : actor + 1, 13], lengths[actor : actor + 1], alone)
        copy = encoder.memory(num_actors=ACTORS, capacity=capacity)
        encoder.prefill(x[:, :12], time[:, :12], lengths, copy)
        actual = encoder.step(x[:, 13], lengths, copy)
        torch.testing.assert_close(actual[actor], expected[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_padding_on_the_right_is_never_seen(case):
    encoder = build(case).eval()
    x = torch.randn(2, 9, INPUT)
    time = torch.arange(9).expand(2, -1)
    padded = torch.cat((x, torch.full((2, 4, INPUT), 1e3)), 1)
    out = encoder(padded, torch.arange(13).expand(2, -1))
    torch.testing.assert_close(out[:, :9], encoder(x, time), atol=1e-5, rtol=0)


LENGTHS = (9, 2, 5, 1, 4, 3)


@pytest.mark.parametrize("case", CASES)
def test_windows_that_share_rows_are_as_windows_with_rows_of_their_own(case):
    encoder = build(case).eval().double()
    x = torch.randn(len(LENGTHS), 9, INPUT, dtype=torch.float64)
    start = torch.tensor([0, 3, 0, 7, 11, 0])
    time = start[:, None] + torch.arange(9)
    real = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    packing = Packing.of(LENGTHS, x)
    assert packing.document_RW.shape == (3, 9)  # 24 tokens
    weigh = torch.randn(len(LENGTHS), 9, encoder.output_size, dtype=torch.float64)[real]
    grads, outs = [], []
    for packed in (False, True):
        encoder.zero_grad()
        inputs = x.clone().requires_grad_()
        if packed:
            out = packing.unpack(encoder(packing.pack(inputs), packing.pack(time), packing))
        else:
            out = encoder(inputs, time)
        (out[real] * weigh).sum().backward()
        outs.append(out[real])
        grads.append([inputs.grad[real], *(p.grad for p in encoder.parameters() if p.grad is not None)])
    torch.testing.assert_close(outs[1], outs[0], atol=1e-8, rtol=0)
    for packed, padded in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(packed, padded, atol=1e-8, rtol=0)


@pytest.mark.parametrize(
    "case", ["transformer", "transformer-dropout", "transformer-sink", "feedforward", "gru", "mingru", "mamba"]
)
def test_computing_again_in_the_backward_changes_no_gradient(case):
    encoder, gradients = build(case).train(), []
    x, time = torch.randn(2, 40, INPUT), torch.arange(40).expand(2, -1)
    for encoder.activation_checkpointing in (False, True):
        encoder.zero_grad()
        torch.manual_seed(3)  # dropout
        encoder(x, time).square().sum().backward()
        gradients.append([parameter.grad for parameter in encoder.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["dropout_attention", "dropout_qkv"])
@torch.no_grad()
def test_without_any_attention_only_biases_are_added(name):
    settings = TypeAdapter(SequenceSettings).validate_python(TRANSFORMER | {"dropout": 0.0, name: 1.0})
    encoder = make_sequence_encoder(INPUT, settings)
    for parameter in encoder.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    x, time = torch.randn(2, 9, INPUT), torch.arange(9).expand(2, -1)
    expected = encoder._embed(x, time)
    for block in encoder.blocks:
        expected = expected + block.after_attention(block.merge.bias)
        expected = expected + block._feed(expected)
    torch.testing.assert_close(encoder.train()(x, time), encoder.norm(expected))
    assert not torch.allclose(encoder.eval()(x, time), encoder.norm(expected), atol=1e-3)


@pytest.mark.parametrize("case", ["transformer", "transformer-learned", "transformer-rope"])
@torch.no_grad()
def test_positions_matter(case):
    encoder = build(case).eval()
    x = torch.randn(1, 6, INPUT)
    time = torch.arange(6)[None]
    swapped = torch.cat((x[:, [1, 0]], x[:, 2:]), 1)
    assert (encoder(x, time)[:, -1] - encoder(swapped, time)[:, -1]).abs().max() > 1e-4


@torch.no_grad()
def test_sinusoid_reaches_beyond_its_first_table():
    encoder = build("transformer").eval()
    x = torch.randn(1, 3, INPUT)
    far = encoder(x, torch.tensor([[5000, 5001, 5002]]))
    assert torch.isfinite(far).all()
    again = encoder(x, torch.tensor([[0, 1, 2]]))
    torch.testing.assert_close(again, build("transformer").eval()(x, torch.tensor([[0, 1, 2]])))


def test_learned_positions_start_as_large_as_the_tokens_they_are_added_to():
    torch.manual_seed(0)
    settings = TypeAdapter(SequenceSettings).validate_python(TRANSFORMER | {"position": "learned"})
    encoder = make_sequence_encoder(64, settings)
    tokens = encoder.embed(torch.nn.functional.layer_norm(torch.randn(500, 64), (64,)))  # as timestep encoders end
    ratio = (encoder.position.weight.std() / tokens.std()).item()
    assert 0.5 < ratio < 1


def test_a_time_index_without_a_row_is_refused():
    encoder = build("transformer-learned")
    encoder.require_time(STEPS - 1)
    with pytest.raises(UsageError, match=r"time index 24 is beyond .* set agent.sequence.max_time to 25 or more"):
        encoder.require_time(STEPS)
    build("transformer").require_time(10**6)


def test_a_plug_in_is_named_in_the_settings():
    settings = TypeAdapter(SequenceSettings).validate_python(
        {"kind": "tests.nets.test_sequence:Doubled", "options": {"factor": 2}}
    )
    assert make_sequence_encoder(3, settings).factor == 2


class Doubled(torch.nn.Module):
    def __init__(self, input_size, settings):
        super().__init__()
        self.factor, self.output_size = settings.options["factor"], input_size


def test_a_sinusoid_is_the_same_from_its_table_and_computed(monkeypatch):
    position, time = Sinusoid(9), torch.tensor([[0, 3, 700], [1, 2, 5000]])
    looked_up = position(time)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(position(time), looked_up)
    phase = 3 / 10_000 ** (2 * 2 / 9)
    torch.testing.assert_close(looked_up[0, 1, 4:6], torch.tensor([math.sin(phase), math.cos(phase)]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("packed", [False, True])
def test_fused_kernels_of_mamba_are_the_torch_scan(packed):
    pytest.importorskip("mamba_ssm")
    settings = {"kind": "mamba", "d_model": 16, "num_layers": 2, "state": 16}
    outs = []
    real = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    packing = Packing(LENGTHS, time=9, device="cuda") if packed else None
    x, time = torch.randn(len(LENGTHS), 9, INPUT, device="cuda"), torch.arange(9, device="cuda").expand(6, -1)
    for scan in ("auto", "torch"):
        torch.manual_seed(0)
        table = TypeAdapter(SequenceSettings).validate_python({**settings, "scan": scan})
        encoder = make_sequence_encoder(INPUT, table).cuda()
        if packing is None:
            out = encoder(x, time)
        else:
            out = packing.unpack(encoder(packing.pack(x), packing.pack(time), packing))
        outs.append(out[real.cuda()])
    torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-3)
