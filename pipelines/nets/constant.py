"""Functions that a compiler may treat as constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """Mark `function` as constant: a compiled program stores its result instead of calling it.

    Same as `torch.compiler.assume_constant_result`, without importing the compiler: that takes as long as importing all
    of torch, and most commands compile nothing.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
