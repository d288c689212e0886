"""A value computed from tensors, kept until one of them changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """Holds one value. A change in place is seen by a tensor's version (a change of its `data` is not), a move by its
    device. A copy of the holder is empty, since the versions of copied tensors begin again."""

    def __init__(self) -> None:
        self._tensors: Sequence[Tensor] = ()
        self._state: list[tuple[int, torch.device]] = []
        self._value: Value | None = None

    def get(self, tensors: Sequence[Tensor], make: Callable[[], Value]) -> Value:
        """Return the value of `make`, called only if `tensors` are others than at the last call, or have changed."""
        value = self.find(tensors)
        return self.set(tensors, make()) if value is None else value

    def find(self, tensors: Sequence[Tensor]) -> Value | None:
        """Return the value, if it is that of `tensors` as they are."""
        same = len(tensors) == len(self._tensors) and all(a is b for a, b in zip(tensors, self._tensors, strict=True))
        return self._value if same and _state(tensors) == self._state else None

    def set(self, tensors: Sequence[Tensor], value: Value) -> Value:
        """Keep a value that is known to be that of `tensors` as they are."""
        self._value, self._tensors, self._state = value, tensors, _state(tensors)
        return value

    def __reduce__(self) -> Any:
        return Kept, ()


def _state(tensors: Sequence[Tensor]) -> list[tuple[int, torch.device]]:
    return [(tensor._version, tensor.device) for tensor in tensors]
