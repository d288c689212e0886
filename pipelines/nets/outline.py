"""The outline of a network: its modules without numbers, to see whether somebody else's weights fit before it is built.

A record of a few bytes can describe a network of any size. An outline costs no memory for its weights, and is given up
as soon as it has more parameters than there are weights.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pipelines.files.checksums import Mismatch

_Network = TypeVar("_Network", bound=nn.Module)
# A module may register a parameter twice, by replacing it: built-in ones do not.
_REPLACED = 2


def outline(make: Callable[[], _Network], weights: Mapping[str, Tensor]) -> _Network:
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
    left, largest = _REPLACED * len(weights), sum(weight.numel() for weight in weights.values())
    thread = threading.get_ident()

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal left
        if parameter is None or threading.get_ident() != thread:
            return
        left -= 1
        if left < 0 or parameter.numel() > largest:
            raise Mismatch("the network that it describes is larger than its weights")

    hook: Any = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def require_fit(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise Mismatch unless `weights` are those of `network`: the same names, shapes and dtypes."""
    wanted = network.state_dict()
    if differing := sorted(wanted.keys() ^ weights.keys()):
        missing = differing[0] in wanted
        raise Mismatch(f"its weights {'lack' if missing else 'have also'} '{differing[0][:80]}'")
    for name, own in wanted.items():
        given = weights[name]
        if (given.shape, given.dtype) != (own.shape, own.dtype):
            raise Mismatch(f"its weights have '{name}' of {_shape(given)}, not of {_shape(own)}")


def _shape(tensor: Tensor) -> str:
    return f"{' x '.join(map(str, tensor.shape)) or '1'} {str(tensor.dtype).removeprefix('torch.')}"
