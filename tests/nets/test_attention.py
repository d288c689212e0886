"""Every backend against attention as written on paper."""

import pytest
import torch

from pipelines.nets.attention import BACKENDS, attend, attend_cached, dense


def qkv(batch=3, heads=2, length=7, size=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, batch, heads, length, size, generator=generator).requires_grad_()


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("window", [None, 1, 3, 7, 20])
def test_backend_equals_dense_in_value_and_gradient(backend, window):
    ours, theirs = qkv(), qkv()
    out = attend(*ours, window=window, backend=backend)
    expected = dense(*theirs, window)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_dense_by_hand():
    q = torch.tensor([[[[0.0], [0.0], [0.0]]]])  # equal scores: means over what is seen
    v = torch.tensor([[[[1.0], [3.0], [8.0]]]])
    torch.testing.assert_close(dense(q, q, v, None)[0, 0, :, 0], torch.tensor([1.0, 2.0, 4.0]))
    torch.testing.assert_close(dense(q, q, v, 2)[0, 0, :, 0], torch.tensor([1.0, 2.0, 5.5]))


def test_cached_query_equals_last_row_and_ignores_empty_slots():
    q, k, v = qkv().detach()
    visible = torch.arange(7)[None] < torch.tensor([[7], [4], [1]])
    out = attend_cached(q[:, :, -1], k, v, visible)
    for actor, length in enumerate((7, 4, 1)):
        one = slice(actor, actor + 1)
        query = q[one, :, -1:].expand(-1, -1, length, -1)
        expected = dense(query, k[one, :, :length], v[one, :, :length], None)[0, :, -1]
        torch.testing.assert_close(out[actor], expected)
