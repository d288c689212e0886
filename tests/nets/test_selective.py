"""The recurrence of selective state spaces against a loop that writes it down."""

import pytest
import torch

from pipelines.nets import mamba, scan
from pipelines.nets.mamba import selective_scan
from tests.tiers import some


def given(length=11, dtype=torch.float64, batch=2, channels=3, states=4):
    """x, delta, rate, into, out, first."""
    torch.manual_seed(0)
    x, raw = torch.randn(2, batch, length, channels, dtype=dtype)
    rate = -3 * torch.rand(channels, states, dtype=dtype)
    into, out = torch.randn(2, batch, length, states, dtype=dtype)
    tensors = (x, raw.abs(), rate, into, out, torch.randn(batch, channels, states, dtype=dtype))
    return [tensor.clone().requires_grad_() for tensor in tensors]


def literal(x, delta, rate, into, out, h, begins=None):
    outputs = []
    for t in range(x.shape[1]):
        if begins is not None:
            h = torch.where(begins[:, t, None, None], 0.0, h)
        h = torch.exp(delta[:, t, :, None] * rate) * h + (delta[:, t] * x[:, t])[..., None] * into[:, t, None]
        outputs.append((h * out[:, t, None]).sum(-1))
    return torch.stack(outputs, 1), h


def gradients(function, tensors, *more):
    """Output, last state, and gradients of something that uses both."""
    y, last = function(*tensors, *more)
    (y.square().sum() + (last * torch.arange(last.numel()).view_as(last)).sum()).backward()
    return [y, last, *(tensor.grad for tensor in tensors)]


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_selective_scan_in_chunks_is_the_literal_recurrence(monkeypatch, chunk, documents, dtype):
    monkeypatch.setattr(mamba._Chunks, "choose_size", staticmethod(lambda dx, states: min(chunk, dx.shape[1])))
    begins = torch.rand(2, 11, generator=torch.Generator().manual_seed(1)) < 0.3 if documents else None
    ours = gradients(selective_scan, given(dtype=dtype), begins)
    exact = gradients(literal, [t.detach().double().requires_grad_() for t in given(dtype=dtype)], begins)
    for a, b in zip(ours, exact, strict=True):
        assert (a - b).norm() < (1e-6 if dtype == torch.float32 else 1e-14) * b.norm()


@pytest.mark.parametrize("documents", [False, True])
def test_in_parallel_as_in_steps(monkeypatch, documents):
    """What devices do where a step is a launch."""
    begins = torch.rand(2, 11, generator=torch.Generator().manual_seed(1)) < 0.3 if documents else None
    monkeypatch.setattr(mamba._Chunks, "choose_size", staticmethod(lambda dx, states: 4))
    ours = gradients(selective_scan, given(), begins)
    monkeypatch.setattr(scan, "runs_in_steps", lambda device: False)
    for a, b in zip(gradients(selective_scan, given(), begins), ours, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_are_those_of_differences():
    assert torch.autograd.gradcheck(selective_scan, given(length=5))


@pytest.mark.system
def test_it_is_a_sound_operator():
    x, delta, rate, into, out, first = given(dtype=torch.float32)
    parts = (x, delta, rate.t().contiguous(), into, out, first.transpose(1, 2).contiguous(), None)
    parts = [None if t is None else t.detach().requires_grad_() for t in parts]
    torch.library.opcheck(torch.ops.amago.selective_scan.default, parts)


@pytest.mark.system
@pytest.mark.parametrize("slowest", some([1e-3, 30.0], 0))
def test_long_windows_neither_overflow_nor_lose_what_they_remember(slowest):
    """Decays next to one over thousands of tokens, and decays that are zero in float32."""
    length, generator = 3_000, torch.Generator().manual_seed(0)
    x, delta = torch.rand(2, 1, length, 2, generator=generator)
    rate = -torch.tensor([[1e-4, slowest, 200.0]]).expand(2, 3)
    into, out = torch.rand(2, 1, length, 3, generator=generator)
    tensors = (x, delta, rate, into, out, torch.ones(1, 2, 3))
    ours = gradients(selective_scan, [t.clone().requires_grad_() for t in tensors])
    exact = gradients(literal, [t.double().requires_grad_() for t in tensors])
    for a, b in zip(ours, exact, strict=True):
        assert (a - b).norm() < 2e-5 * b.norm()
