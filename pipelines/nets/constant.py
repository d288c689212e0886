"""Functions that a compiler may take as given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """`function`, whose answers never change: a compiled program holds the answer and does not ask.

    What `torch.compiler.assume_constant_result` does, without importing the compiler for it: that takes as long as
    importing all of torch, and most commands compile nothing.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
