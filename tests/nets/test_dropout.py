"""Dropout of the Transformer: on the embedding and on what each feed-forward adds; while training, never else."""

import pytest
import torch
from torch.nn import functional as F

from pipelines.config.model import TransformerSettings
from pipelines.nets.attention import AttentionWindow, dense
from pipelines.nets.transformer import Transformer

P = 0.5


def encoder():
    torch.manual_seed(0)
    return Transformer(6, TransformerSettings(d_model=8, num_layers=2, num_heads=2, d_ff=16, dropout=P))


def written_out(net, x, time, drop):
    """The same with each dropout where it belongs; draws from torch's global generator in the order of the layers."""

    def attention(q, k, v):
        return dense(q, k, v, AttentionWindow().within(x.shape[1]))

    x = drop(net._embed(x, time))
    for block in net.blocks:
        x = x + block._mix(x, attention, False)
        x = x + drop(block._feed(x))
    return net.norm(x)


def inputs():
    return torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1)), torch.arange(5).expand(3, -1)


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_in_training_it_is_on_the_embedding_and_on_every_feed_forward(activation_checkpointing):
    net, (x, time) = encoder().train(), inputs()
    net.activation_checkpointing = activation_checkpointing
    torch.manual_seed(7)
    actual = net(x, time)
    torch.manual_seed(7)
    torch.testing.assert_close(actual, written_out(net, x, time, lambda y: F.dropout(y, P)), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(actual, net(x, time))


def test_in_evaluation_there_is_none():
    net, (x, time) = encoder().eval(), inputs()
    torch.testing.assert_close(net(x, time), written_out(net, x, time, lambda y: y), atol=1e-5, rtol=1e-4)
    assert torch.equal(net(x, time), net(x, time))
