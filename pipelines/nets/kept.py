"""A value computed from tensors, kept until one of them changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """Holds one value. A change in place is seen by a tensor's version, a move by its device; a copy of the holder is
    empty, since the versions of copied tensors begin again."""

    def __init__(self) -> None:
        self._tensors: Sequence[Tensor] = ()
        self._state: list[tuple[int, torch.device]] = []
        self._value: Value | None = None

    def get(self, tensors: Sequence[Tensor], make: Callable[[], Value]) -> Value:
        """Return the value of `make`, called only if `tensors` are others than at the last call, or have changed."""
        state = [(tensor._version, tensor.device) for tensor in tensors]
        same = len(tensors) == len(self._tensors) and all(a is b for a, b in zip(tensors, self._tensors, strict=True))
        if self._value is None or not same or state != self._state:
            self._value, self._tensors, self._state = make(), tensors, state
        return self._value

    def __reduce__(self) -> Any:
        return Kept, ()
