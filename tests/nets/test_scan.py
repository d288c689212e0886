"""Recurrences against loops that write them down."""

import pytest
import torch

from pipelines.nets import scan
from pipelines.nets.compute import export_operators
from pipelines.nets.scan import linear_scan, recur, recur_back, scan_by_doubling


def literal(a, b, first):
    h, out = first, []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        out.append(h)
    return torch.stack(out, 1)


@pytest.mark.parametrize("length", [1, 2, 7, 16])
@pytest.mark.parametrize(("function", "steps"), [(linear_scan, True), (linear_scan, False), (scan_by_doubling, False)])
def test_a_scan_is_the_recurrence_in_value_and_gradient(monkeypatch, function, steps, length):
    monkeypatch.setattr(scan, "runs_in_steps", lambda device: steps)
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


def test_older_torch_says_that_it_exports_whenever_it_compiles(monkeypatch):
    monkeypatch.setattr("torch.compiler.is_exporting", lambda: True)  # as up to torch 2.12
    a, b, first = torch.rand(2, 5, 3), torch.randn(2, 5, 3), torch.randn(2, 3)
    torch.testing.assert_close(linear_scan(a, b, first), literal(a, b, first))
    with export_operators():  # of a single step
        torch.testing.assert_close(linear_scan(a[:, :1], b[:, :1], first), literal(a[:, :1], b[:, :1], first))
    torch.testing.assert_close(linear_scan(a, b, first), literal(a, b, first))


def test_gradients_of_a_scan_are_those_of_differences():
    torch.manual_seed(0)
    tensors = (torch.rand(2, 5, 2), torch.randn(2, 5, 2), torch.randn(2, 2))
    assert torch.autograd.gradcheck(linear_scan, [tensor.double().requires_grad_() for tensor in tensors])


def test_a_scan_backwards_is_the_scan_of_the_reversed():
    torch.manual_seed(0)
    a, b = torch.rand(2, 6, 3), torch.randn(2, 6, 3)
    back = b.clone()
    recur_back(a, back)
    forth = b.flip(1).contiguous()
    recur(torch.cat((a[:, :1], a[:, 1:].flip(1)), 1), forth, torch.zeros(2, 3))
    torch.testing.assert_close(back, forth.flip(1))


@pytest.mark.system
def test_scans_are_sound_operators():
    a, b, first = torch.rand(2, 5, 2), torch.randn(2, 5, 2), torch.randn(2, 2)
    for tensor in (a, b, first):
        tensor.requires_grad_()
    torch.library.opcheck(torch.ops.amago.linear_scan.default, (a, b, first))
