"""Recurrences against loops that write them down."""

import pytest
import torch

from pipelines.nets import scan
from pipelines.nets.scan import doubling, linear_scan, selective_scan


def literal(a, b, first):
    h, out = first, []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        out.append(h)
    return torch.stack(out, 1)


@pytest.mark.parametrize("length", [1, 2, 7, 16])
@pytest.mark.parametrize("function", [linear_scan, doubling])
def test_a_scan_is_the_recurrence_in_value_and_gradient(function, length):
    torch.manual_seed(0)
    tensors = (torch.rand(2, length, 3), torch.randn(2, length, 3), torch.randn(2, 3))
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in tensors] for _ in range(2))
    weigh = torch.randn(2, length, 3)
    out, expected = function(*ours), literal(*theirs)
    torch.testing.assert_close(out, expected)
    (out * weigh).sum().backward()
    (expected * weigh).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_gradients_of_a_scan_are_those_of_differences():
    torch.manual_seed(0)
    tensors = (torch.rand(2, 5, 2), torch.randn(2, 5, 2), torch.randn(2, 2))
    assert torch.autograd.gradcheck(linear_scan, [tensor.double().requires_grad_() for tensor in tensors])


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("documents", [False, True])
def test_a_selective_scan_in_chunks_is_the_literal_recurrence(monkeypatch, chunk, documents):
    monkeypatch.setattr(scan, "CHUNK", chunk)
    torch.manual_seed(0)
    batch, length, channels, states = 2, 11, 3, 4
    x, raw = torch.randn(2, batch, length, channels)
    rate = -torch.rand(channels, states)
    into, out = torch.randn(2, batch, length, states)
    first = torch.randn(batch, channels, states)
    begins = torch.rand(batch, length) < 0.3 if documents else None
    given = [t.clone().requires_grad_() for t in (x, raw.abs(), rate, into, out, first)]
    y, last = selective_scan(*given, begins)

    again = [t.clone().requires_grad_() for t in (x, raw.abs(), rate, into, out, first)]
    x_, delta_, rate_, into_, out_, h = again
    expected = []
    for t in range(length):
        if begins is not None:
            h = torch.where(begins[:, t, None, None], 0.0, h)
        h = torch.exp(delta_[:, t, :, None] * rate_) * h + (delta_[:, t] * x_[:, t])[..., None] * into_[:, t, None]
        expected.append((h * out_[:, t, None]).sum(-1))
    torch.testing.assert_close(y, torch.stack(expected, 1))
    torch.testing.assert_close(last, h)
    (y.square().sum() + last.sum()).backward()
    (torch.stack(expected, 1).square().sum() + h.sum()).backward()
    for a, b in zip(given, again, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
