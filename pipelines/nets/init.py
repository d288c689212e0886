"""Every weight initialisation of the networks, in one place. All draw from torch's global generator, which `Agent`
forks and seeds.

hidden    orthogonal, gain sqrt(2) (a rectifier or similar follows); biases zero
output    orthogonal, small gain: .01 for policies (near uniform at first), .1 for values
positions normal, std sqrt(1/2), the RMS of the sinusoid; the tokens they are added to have an RMS of about 1
ramp      from -.1 to .1: biases of the encoder of time steps, whose inputs may all be zero
stream    truncated normal, std .02, cut at two std: linears of the Transformer, whose scale is learned anyway

An outline is a network's modules without numbers, to see whether somebody else's weights fit before it is built. A
record of a few bytes can describe a network of any size; an outline costs no memory for its weights, and is given up as
soon as it has more parameters than there are weights.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pipelines.files.checksums import Mismatch
from pipelines.nets.compute import Linear

_Layer = TypeVar("_Layer", bound=nn.Module)
POLICY_GAIN = 0.01
VALUE_GAIN = 0.1


def is_outline() -> bool:
    """Check whether modules are built as an outline (`make_outline`), whose tensors have no values.

    Values are then not computed: that would take time, and import the compiler of torch for some functions.
    """
    return torch.get_default_device().type == "meta"


def fill_hidden(weight: Tensor) -> Tensor:
    """Fill `weight` (out, in, ...) for a layer followed by an activation."""
    return nn.init.orthogonal_(weight, gain=math.sqrt(2))


def fill_stream(weight: Tensor) -> Tensor:
    """Fill `weight` (out, in) of a linear on the residual stream."""
    return nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04)


def fill_positions(weight: Tensor) -> Tensor:
    """Fill `weight` (rows, width) of a learned table of positions."""
    return weight if is_outline() else nn.init.normal_(weight, std=math.sqrt(0.5))


def fill_members(weight_CIO: Tensor, gain: float) -> Tensor:
    """Fill each member (in, out) of an ensemble's weights with its own orthogonal matrix."""
    # A forged record may ask for any number of members.
    if is_outline():
        return weight_CIO
    with torch.no_grad():
        for member in weight_CIO:
            member.copy_(nn.init.orthogonal_(torch.empty(member.shape[1], member.shape[0]), gain=gain).T)
    return weight_CIO


def make_layer(
    layer: type[_Layer], *arguments: Any, fill: Callable[[Tensor], Tensor] = fill_hidden, **options: Any
) -> _Layer:
    """Construct a layer whose weight is initialised by `fill`, and whose bias starts at zero."""
    # By itself, skip_init puts a layer on the CPU, even where an outline is built.
    made: Any = nn.utils.skip_init(layer, *arguments, **options, device=torch.get_default_device())
    fill(made.weight)
    nn.init.zeros_(made.bias)
    return cast(_Layer, made)


def fill_ramp(bias: Tensor) -> None:
    """Fill `bias` (out,) with small different numbers, from -0.1 to 0.1."""
    if not is_outline():
        with torch.no_grad():
            bias.copy_(torch.linspace(-0.1, 0.1, len(bias)))


def make_linear(inputs: int, outputs: int, *, gain: float | None = None) -> Linear:
    """Construct a linear layer, hidden by default, an output layer if `gain` is given."""
    fill = fill_hidden if gain is None else functools.partial(nn.init.orthogonal_, gain=gain)
    return make_layer(Linear, inputs, outputs, fill=fill)


_Network = TypeVar("_Network", bound=nn.Module)
# A module may register a parameter twice, by replacing it: built-in ones do not.
_REPLACED = 2


def make_outline(make: Callable[[], _Network], weights: Mapping[str, Tensor]) -> _Network:
    """Build a network on the meta device. Mismatch as soon as it has more parameters than `weights`, or a larger one.

    The modules that `make` builds must not read values of their parameters.
    """
    with limit_parameters(weights), torch.device("meta"):
        return make()


@contextlib.contextmanager
def limit_parameters(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse, in this thread, modules that have more parameters than `weights`, or one with more numbers than all of
    them. Mismatch is raised before the parameter is initialised.
    """
    before = _limits.left, _limits.largest
    _limits.left, _limits.largest = _REPLACED * len(weights), sum(weight.numel() for weight in weights.values())
    try:
        yield
    finally:
        _limits.left, _limits.largest = before


class _Limits(threading.local):
    """How many parameters, of how many numbers, may still be registered in this thread."""

    left: float = math.inf
    largest: float = math.inf


_limits = _Limits()


def _count_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if parameter is None:
        return
    _limits.left -= 1
    if _limits.left < 0 or parameter.numel() > _limits.largest:
        raise Mismatch("the network that it describes is larger than its weights")


# For good: torch's hooks must not change while another thread, which constructs a module, goes through them.
register_module_parameter_registration_hook(_count_parameter)


def require_fit(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise Mismatch unless `weights` are those of `network`: the same names, shapes and dtypes."""
    wanted = network.state_dict()
    if differing := sorted(wanted.keys() ^ weights.keys()):
        missing = differing[0] in wanted
        raise Mismatch(f"its weights {'lack' if missing else 'have also'} '{differing[0][:80]}'")
    for name, own in wanted.items():
        given = weights[name]
        if (given.shape, given.dtype) != (own.shape, own.dtype):
            found, expected = (
                f"{' x '.join(map(str, tensor.shape)) or '1'} {str(tensor.dtype).removeprefix('torch.')}"
                for tensor in (given, own)
            )
            raise Mismatch(f"its weights have '{name}' of {found}, not of {expected}")
