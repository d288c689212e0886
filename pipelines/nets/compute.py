"""How networks compute: their precision, values that are kept until a tensor changes, and functions that a compiler may
treat as constant."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


def choose_precision(setting: str, device: torch.device) -> str:
    """Choose the precision that `auto` stands for on a device: bf16 where it has units for it, which a CPU may not."""
    if setting != "auto":
        return setting
    has_units = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return "bf16" if has_units else "float32"


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Make the context in which a network computes.

    Casts of parameters are not cached: those made without gradient would be reused where a gradient is needed.
    """
    dtype = DTYPES[precision]
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype, cache_enabled=False)


def choose_dtype(device: torch.device) -> torch.dtype:
    """Choose the dtype to compute products in: autocast's, where it is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32


@contextmanager
def keep_float32() -> Iterator[None]:
    """Make a context in which matrices are not rounded to TF32, whatever `train.precision` says. A matrix that
    multiplies a vector never is, but a batch of them would be."""
    flags = torch.backends.cuda.matmul
    before, flags.allow_tf32 = flags.allow_tf32, False
    try:
        yield
    finally:
        flags.allow_tf32 = before


_is_exporting = False


@contextmanager
def export_operators() -> Iterator[None]:
    """Make a context in which networks compute by operators that other runtimes have, too."""
    global _is_exporting
    before, _is_exporting = _is_exporting, True
    try:
        yield
    finally:
        _is_exporting = before


def is_exporting() -> bool:
    """Check whether a network is traced for other runtimes. `torch.compiler.is_exporting` does not say it: up to torch
    2.12 it is true in every program that `torch.compile` traces."""
    return _is_exporting


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

    def clear(self) -> None:
        """Forget the value, and the tensors and autograd nodes that it refers to."""
        self._value, self._tensors, self._state = None, (), []

    @staticmethod
    def _describe(tensors: Sequence[Tensor]) -> list[tuple[int, torch.device]]:
        return [(tensor._version, tensor.device) for tensor in tensors]

    def __reduce__(self) -> Any:
        return Kept, ()


def forget_kept(network: nn.Module) -> None:
    """Forget what the layers of `network` have derived from their weights."""
    for module in network.modules():
        for value in vars(module).values():
            if isinstance(value, Kept):
                value.clear()


class Linear(nn.Linear):
    """Linear layer that casts its weights to autocast's precision once, until they change, not at each use."""

    def __init__(self, inputs: int, outputs: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(inputs, outputs, device=device, dtype=dtype)
        self._casts = Kept[list[Tensor]]()

    def forward(self, x: Tensor) -> Tensor:
        kind, tensors = x.device.type, [self.weight, self.bias]
        if torch.compiler.is_compiling() or not torch.is_autocast_enabled(kind):  # a compiler fuses casts
            return F.linear(x, *tensors)
        if not torch.is_grad_enabled():
            dtype = torch.get_autocast_dtype(kind)
            return F.linear(x, *self._casts.get(tensors, lambda: [tensor.to(dtype) for tensor in tensors]))
        casts = self._casts.find(tensors)
        # Casts that were made without gradient serve only there.
        learns = casts is not None and all(
            a.requires_grad == b.requires_grad for a, b in zip(casts, tensors, strict=True)
        )
        return F.linear(x, *(casts if casts is not None and learns else tensors))

    def keep_casts(self, casts: list[Tensor]) -> None:
        """Keep casts of weight and bias, for as long as these do not change."""
        self._casts.set([self.weight, self.bias], casts)


class _Cast(torch.autograd.Function):
    """Casts of many tensors in one kernel, and of their gradients in another."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = tensors[0].dtype
        casts = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        torch._foreach_copy_(casts, tensors)
        return tuple(casts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given = [grad for grad in grads if grad is not None]
        wide = [torch.empty_like(grad, dtype=ctx.dtype) for grad in given]
        if given:
            torch._foreach_copy_(wide, given)
        found = iter(wide)
        return None, *(None if grad is None else next(found) for grad in grads)


def cast_weights(layers: Sequence[Linear]) -> None:
    """Cast the weights of all layers, which are on one device, to autocast's precision, where it is on. Each would
    otherwise be a kernel, and so would its gradient."""
    kind = layers[0].weight.device.type if layers else "cpu"
    if not layers or not torch.is_autocast_enabled(kind):
        return
    tensors = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    cast: Callable[..., tuple[Tensor, ...]] = _Cast.apply
    casts = cast(torch.get_autocast_dtype(kind), *tensors)
    for place, layer in enumerate(layers):
        layer.keep_casts([*casts[2 * place : 2 * place + 2]])


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
