import math

import torch
from torch import nn

from pipelines.config.model import TransformerSettings
from pipelines.learning.diagnostics import find_dead_units, probe
from pipelines.nets.transformer import Transformer


def test_dead_units_by_hand():
    x = torch.tensor([[[1.0, -0.01, 0.0, -3.0], [2.0, -0.01, 0.0, 1.0], [9.0, 9.0, 9.0, 9.0]]])
    real = torch.tensor([[True, True, False]])  # means 1.5, .01, 0, 2; of all .8775; a 40th of it .022
    assert find_dead_units(x, real).tolist() == [False, True, True, False]


def transformer(**settings):
    torch.manual_seed(0)
    return Transformer(4, TransformerSettings(d_model=8, num_heads=2, num_layers=2, d_ff=16, **settings))


def test_entropy_of_attention_that_looks_nowhere_in_particular():
    encoder = transformer(dropout=0.0)
    with torch.no_grad():
        for block in encoder.blocks:
            block.qkv.gain.zero_()
            block.qkv.bias[:16] = 0
    tokens, time = torch.randn(2, 5, 4), torch.arange(5).expand(2, -1)
    expected = sum(math.log(seen) for seen in range(1, 6)) / 5
    torch.testing.assert_close(encoder.inspect(tokens, time)["attention_entropy"], torch.tensor(expected))


def test_a_probe_counts_the_dead_units_of_each_encoder_on_real_tokens():
    timestep = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LeakyReLU())
    with torch.no_grad():
        timestep[0].weight.copy_(torch.diag(torch.tensor([1.0, 1.0, -1.0, 0.0])))
    real = torch.tensor([[True, True, False]])
    x = torch.ones(1, 3, 4)
    x[~real] = -1000.0

    def encode(windows, rows):
        return timestep(x[windows, rows]), torch.arange(3)[None, rows], real[windows, rows]

    figures = probe(timestep, transformer(), encode)
    assert figures["dead_units_timestep"].item() == 0.5  # one is always negative, one always zero
    assert 0 <= figures["dead_units_sequence"].item() < 1
    assert not timestep[1]._forward_hooks
