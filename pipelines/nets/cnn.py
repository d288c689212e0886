"""Convolutional encoders of images. C channels, X height, Y width, B batch, T time."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipelines.config.model import Activation, ImageSettings
from pipelines.errors import UsageError
from pipelines.nets import init
from pipelines.nets.activation import activation as make_activation

_NATURE_PIXELS = 36  # minimum side for the strided kernels
# (channels, kernel, stride) of each layer; Nature: Mnih et al. 2015, "Methods"
_NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
_GRID = ((16, 2, 1), (32, 2, 1), (64, 2, 1))
IMPALA = (16, 32, 32)  # channels of each stage; Espeholt et al. 2018, arXiv 1802.01561, figure 3
GROUP = 8  # channels normalised together
CPU_PIXELS, _CUDA_PIXELS = 1 << 18, 1 << 21  # encoded at a time with activation checkpointing


def channels_first(shape: tuple[int, int, int]) -> bool:
    """Return whether images of this shape are (C, X, Y), that is, whether C is less than both sides."""
    return shape[0] < min(shape[1], shape[2])


def _convolution(inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    layer = init.empty(nn.Conv2d, inputs, outputs, kernel, stride=stride, padding=padding)
    init.hidden_(layer.weight)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


class Residual(nn.Module):
    """Residual block: x + convolution(act(norm(.))) twice."""

    def __init__(self, channels: int, activation: Activation) -> None:
        super().__init__()
        self.body = nn.Sequential()
        for _ in range(2):
            self.body.extend((nn.GroupNorm(channels // GROUP, channels), make_activation(activation)))
            self.body.append(_convolution(channels, channels, 3, padding=1))

    def forward(self, x_NCXY: Tensor) -> Tensor:
        return x_NCXY + self.body(x_NCXY)


class ImageEncoder(nn.Module):
    """Convolutional encoder of images (..., X, Y, C) -> (..., features). Images with channels first (C < X, C < Y) are
    recognised; uint8 is divided by 255, other dtypes are used unchanged."""

    def __init__(
        self, shape: tuple[int, int, int], settings: ImageSettings, activation: Activation = "leaky-relu"
    ) -> None:
        super().__init__()
        self.channels_first = channels_first(shape)
        channels, height, width = shape if self.channels_first else (shape[2], shape[0], shape[1])
        kind = settings.kind
        if kind == "auto":
            kind = "nature" if min(height, width) >= _NATURE_PIXELS else "grid"
        if kind == "nature" and min(height, width) < _NATURE_PIXELS:
            raise UsageError(
                f"an image of {height}x{width} is too small for 'nature' ({_NATURE_PIXELS} pixels or more)",
                hint="let agent.timestep.image.kind be auto, impala or grid",
            )
        self.pixels = height * width
        layers: list[nn.Module] = []
        if kind == "impala":
            for outputs in IMPALA:
                layers += [_convolution(channels, outputs, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
                layers += [Residual(outputs, activation), Residual(outputs, activation)]
                height, width, channels = (height + 1) // 2, (width + 1) // 2, outputs
            layers += [nn.GroupNorm(channels // GROUP, channels), make_activation(activation)]
        else:
            for outputs, kernel, stride in _NATURE if kind == "nature" else _GRID:
                padding = int(min(height, width) < kernel)  # a last row or column of a tiny image is kept
                layers += [_convolution(channels, outputs, kernel, stride=stride, padding=padding)]
                layers += [make_activation(activation, inplace=True)]
                height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
                channels = outputs
        self.convolutions = nn.Sequential(*layers)
        self.head = init.linear(channels * height * width, settings.features)

    def forward(self, image: Tensor, *, activation_checkpointing: bool = False) -> Tensor:
        """Encode images. With `activation_checkpointing`, a few at a time, keeping only the stored images: the backward
        encodes them again."""
        flat = image.reshape(-1, *image.shape[-3:])
        if not activation_checkpointing:
            return self._encode(flat).view(*image.shape[:-3], -1)
        encode = self._encode
        if torch.is_grad_enabled():  # nothing in it is random: no generator state to keep
            encode = functools.partial(checkpoint, encode, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([encode(part) for part in flat.split(self._frames(image.device))]).view(*image.shape[:-3], -1)

    def _frames(self, device: torch.device) -> int:
        return max(1, (_CUDA_PIXELS if device.type == "cuda" else CPU_PIXELS) // self.pixels)

    def _encode(self, image_N: Tensor) -> Tensor:
        image_NCXY = image_N if self.channels_first else image_N.permute(0, 3, 1, 2)
        pixels = image_NCXY.to(self.head.weight.dtype)
        maps = self.convolutions(pixels / 255 if image_N.dtype == torch.uint8 else pixels)
        return self.head(maps.flatten(1))


def shifted(image_BT: Tensor, pixels: int, share: float, *, first: bool) -> Tensor:
    """Shift images (B, T, ...) by up to `pixels` in each direction, repeating edges (DrQ; Kostrikov et al. 2021, arXiv
    2004.13649): each window as a whole, and only a `share` of the windows. Draws from torch's global generator."""
    axis = 3 if not first else 4  # of the columns of pixels, in (B, T, X, Y, C) or (B, T, C, X, Y)
    batch, device = len(image_BT), image_BT.device
    shift = torch.randint(-pixels, pixels + 1, (batch, 2), device=device)
    shift = shift * (torch.rand(batch, 1, device=device) < share)
    out = torch.empty_like(image_BT)
    places = [torch.arange(image_BT.shape[side], device=device) for side in (axis - 1, axis)]
    rows, columns = ((place + shift[:, side, None]).clamp(0, len(place) - 1) for side, place in enumerate(places))
    for b in range(batch):
        out[b] = image_BT[b].index_select(axis - 2, rows[b]).index_select(axis - 1, columns[b])
    return out


def require_image(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return `shape` if it has three axes; else raise UsageError."""
    if len(shape) != 3:
        raise UsageError(
            f"column '{name}' of shape {shape} is not an image (height, width, channels)",
            hint="change its way in agent.timestep.columns",
        )
    return shape[0], shape[1], shape[2]
