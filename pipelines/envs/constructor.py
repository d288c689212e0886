"""Parameters of the user's classes and factories: listed, and checked before anything is made."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.config.base import describe_unknown_key, refuse_problems

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of an environment, as `-s env.NAME=...` sets it."""

    name: str
    default: Any = None
    about: str = ""
    required: bool = False


def list_parameters(target: Any, *, without: Collection[str] = ()) -> list[Parameter]:
    """List the named parameters of a class or factory except those in `without`; none if it has no signature."""
    return [
        Parameter(
            name=name,
            default=None if found.default is found.empty else found.default,
            about=""
            if (annotation := found.annotation) is found.empty
            else annotation
            if isinstance(annotation, str)
            else inspect.formatannotation(annotation),
            required=found.default is found.empty,
        )
        for name, found in (_read_signature(target) or {}).items()
        if found.kind in _NAMED and name not in without
    ]


def refuse_wrong_parameters(name: str, target: Any, given: Mapping[str, Any], *, without: Collection[str] = ()) -> None:
    """Raise UsageError, listing all faults, for parameters that `target` requires but are not `given`, and for those
    that it does not accept."""
    signature = _read_signature(target)
    if signature is None:
        return
    known = {parameter.name: parameter for parameter in list_parameters(target, without=without)}
    missing = [parameter.name for parameter in known.values() if parameter.required and parameter.name not in given]
    problems = [f"env.{key}: required; give it with -s env.{key}=..." for key in missing]
    if all(found.kind is not inspect.Parameter.VAR_KEYWORD for found in signature.values()):
        unknown = [key for key in given if key not in known]
        problems += [
            describe_unknown_key(f"env.{key}", key, known) if known else f"env.{key}: it takes no parameters"
            for key in unknown
        ]
    refuse_problems(problems, f"environment '{name}'")


def _read_signature(target: Any) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):  # of some that are written in C
        return None
