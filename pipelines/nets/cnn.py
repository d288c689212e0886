"""Convolutional encoders of uint8 images. C channels, X height, Y width."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipelines.config.encoders import ImageSettings
from pipelines.nets import init

NATURE_PIXELS = 36  # the least side that the strided kernels can take
# (channels, kernel, stride) of each layer; Nature: Mnih et al. 2015, "Methods"
NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
GRID = ((16, 2, 1), (32, 2, 1), (64, 2, 1))


class ImageEncoder(nn.Module):
    """uint8 image (..., X, Y, C) -> (..., features). Images with channels first (C < X, C < Y) are taken as such."""

    def __init__(self, shape: tuple[int, int, int], settings: ImageSettings) -> None:
        super().__init__()
        self.channels_first = shape[0] < min(shape[1], shape[2])
        channels, height, width = shape if self.channels_first else (shape[2], shape[0], shape[1])
        kind = settings.kind
        if kind == "auto":
            kind = "nature" if min(height, width) >= NATURE_PIXELS else "grid"
        if kind == "nature" and min(height, width) < NATURE_PIXELS:
            raise ValueError(f"an image of {height}x{width} is too small for 'nature' ({NATURE_PIXELS} pixels or more)")
        layers: list[nn.Module] = []
        for outputs, kernel, stride in NATURE if kind == "nature" else GRID:
            padding = int(min(height, width) < kernel)  # a last row or column of a tiny image is kept
            layer = nn.utils.skip_init(nn.Conv2d, channels, outputs, kernel, stride=stride, padding=padding)
            init.hidden_(layer.weight)
            nn.init.zeros_(layer.bias)
            layers += [layer, nn.LeakyReLU(inplace=True)]
            height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
            channels = outputs
        self.convolutions = nn.Sequential(*layers)
        self.head = init.linear(channels * height * width, settings.features)

    def forward(self, image: Tensor) -> Tensor:
        leading = image.shape[:-3]
        flat = image.reshape(-1, *image.shape[-3:])
        flat_NCXY = flat if self.channels_first else flat.permute(0, 3, 1, 2)
        maps = self.convolutions(flat_NCXY.to(torch.get_default_dtype()) / 255)
        return self.head(maps.flatten(1)).view(*leading, -1)
