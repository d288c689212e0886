"""Residual blocks of the IMPALA encoder, written out."""

import torch
from torch.nn import functional as F

from pipelines.config.model import ImageSettings
from pipelines.nets.timestep import ImageEncoder, Residual


def test_a_residual_block_adds_two_normalised_convolutions_to_its_input():
    torch.manual_seed(0)
    block, x = Residual(16, "leaky-relu"), torch.randn(2, 16, 5, 4)
    y = x
    for norm, convolution in ((block.body[0], block.body[2]), (block.body[3], block.body[5])):
        y = F.leaky_relu(F.group_norm(y, 2, norm.weight, norm.bias), 0.01)
        y = F.conv2d(y, convolution.weight, convolution.bias, padding=1)
    torch.testing.assert_close(block(x), x + y)


def test_an_impala_encoder_has_two_such_blocks_in_each_of_three_stages():
    net = ImageEncoder((12, 12, 3), ImageSettings(kind="impala"))
    assert [i for i, layer in enumerate(net.convolutions) if isinstance(layer, Residual)] == [2, 3, 6, 7, 10, 11]
