"""How networks compute: their precision, values that are kept until a tensor changes, and functions that a compiler may
treat as constant."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Make the context in which a network computes.

    Casts of parameters are not cached: those made without gradient would be reused where a gradient is needed.
    """
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, DTYPES[precision], cache_enabled=False)


Value = TypeVar("Value")


class Kept(Generic[Value]):
    """A value that is derived from tensors, kept until one of them changes. A change in place raises a tensor's version
    (a change of its `data` does not), and a move changes its device. A copy is empty, since the versions of copied
    tensors begin again."""

    def __init__(self) -> None:
        self._tensors: Sequence[Tensor] = ()
        self._state: list[tuple[int, torch.device]] = []
        self._value: Value | None = None

    def get(self, tensors: Sequence[Tensor], make: Callable[[], Value]) -> Value:
        """Get the value, made again only if `tensors` are others than at the last call, or have changed."""
        value = self.find(tensors)
        return self.set(tensors, make()) if value is None else value

    def find(self, tensors: Sequence[Tensor]) -> Value | None:
        """Get the value if it was made from `tensors` as they are now; otherwise None."""
        same = len(tensors) == len(self._tensors) and all(a is b for a, b in zip(tensors, self._tensors, strict=True))
        return self._value if same and self._describe(tensors) == self._state else None

    def set(self, tensors: Sequence[Tensor], value: Value) -> Value:
        """Keep a value that was made from `tensors` as they are now."""
        self._value, self._tensors, self._state = value, tensors, self._describe(tensors)
        return value

    @staticmethod
    def _describe(tensors: Sequence[Tensor]) -> list[tuple[int, torch.device]]:
        return [(tensor._version, tensor.device) for tensor in tensors]

    def __reduce__(self) -> Any:
        return Kept, ()


P = ParamSpec("P")


def keep_constant(function: Callable[P, Value]) -> Callable[P, Value]:
    """Call `function` once for each set of arguments. A compiled program stores the result instead of calling it.

    Marks as `torch.compiler.assume_constant_result` does, without importing the compiler: that takes as long as
    importing all of torch, and most commands compile nothing.
    """
    kept = functools.cache(function)

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> Value:
        return kept(*arguments, **options)  # type: ignore[arg-type]

    call.cache_clear = kept.cache_clear  # type: ignore[attr-defined]
    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call
