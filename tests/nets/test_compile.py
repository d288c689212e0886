"""Encoders are one graph to a compiler, padded or packed: it is followed without one line of code made."""

import pytest
import torch
import torch._dynamo.testing

from pipelines.nets.attention import lacks
from pipelines.nets.mamba import has_kernels
from pipelines.nets.packing import Packing
from tests.nets.test_sequence import INPUT, build

LENGTHS = (9, 2, 5, 1, 4, 3)


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", ["transformer", "transformer-rope", "transformer-sink", "mingru", "mamba"])
def test_an_encoder_is_one_graph(case, packed):
    torch.compiler.reset()
    encoder = build(case).eval()
    compiled = torch.compile(encoder, backend="eager", fullgraph=True)
    x, time = torch.randn(len(LENGTHS), 9, INPUT), torch.arange(9).expand(len(LENGTHS), -1)
    packing = Packing(LENGTHS, time=9) if packed else None
    if packing is not None:
        x, time = packing.pack(x), packing.pack(time)
    torch.testing.assert_close(compiled(x, time, packing), encoder(x, time, packing))


@pytest.mark.system
def test_what_varies_with_a_batch_makes_no_graph_anew():
    """Kernels of documents see other lengths every time."""
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def through(x, packing):
        return packing.put_tokens(packing.take_tokens(x) * packing.cumulative[-1])

    for lengths in ((9, 2, 5, 1, 4, 3), (8, 7, 1, 3, 3, 2), (9, 3, 3, 4, 1, 4), (7, 6, 2, 2, 5, 1), (9, 9, 1, 1, 1, 1)):
        packing = Packing(lengths, time=9)
        rows, width = packing.document_RW.shape
        x = torch.randn(rows, 2, width, 4)
        real = packing.real_RW[:, None, :, None]
        torch.testing.assert_close(through(x, packing), torch.where(real, x * sum(lengths), 0.0))
    assert counter.frame_count <= 3  # as it is, with variables, and once more where one of them is 1 or equals another


def test_what_is_installed_is_a_constant_to_a_compiler():
    torch.compiler.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def chosen(x):
        return x if has_kernels() else x + len([name for name in ("flash", "varlen", "flex") if lacks(name)])

    absent = sum(lacks(name) is not None for name in ("flash", "varlen", "flex"))
    assert chosen(torch.zeros(())).item() == (0 if has_kernels() else absent)
