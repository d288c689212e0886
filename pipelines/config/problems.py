"""Converting validation errors into actionable lines: the key, what was expected, the nearest valid key."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from pipelines.errors import UsageError
from pipelines.nearest import did_you_mean


def describe(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return one line for each error in `error`; keys are dotted, starting at `prefix`."""
    return [_line(dict(fault), model, prefix) for fault in error.errors(include_url=False)]


def unknown_key(key: str, name: str, known: Iterable[str]) -> str:
    """Return the line for an unknown key; `name` is its last part, `known` its possible spellings."""
    known = sorted(known)
    above = key[: len(key) - len(name)]
    hint = did_you_mean(name, known, prefix=above, otherwise=f"known here: {', '.join(known)}")
    return f"{key}: no such key; {hint}"


def refuse(problems: list[str], source: str) -> None:
    """Raise one UsageError that lists every problem, if there are any."""
    if problems:
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        raise UsageError(f"{count} in the configuration ({source})", problems=tuple(problems))


def _line(fault: dict[str, Any], model: type[BaseModel], prefix: str) -> str:
    parts, fields = _spelled(model, fault["loc"])
    key = ".".join([*([prefix] if prefix else []), *parts])
    if fault["type"] == "extra_forbidden":
        return unknown_key(key, parts[-1], fields)
    if fault["type"] == "value_error":  # one of our own messages, which includes the input
        return f"{key or 'document'}: {fault['msg'].removeprefix('Value error, ')}"
    message = fault["msg"][:1].lower() + fault["msg"][1:].replace("'', ", "")  # the empty choice means: not given
    if fault["type"] in ("model_type", "model_attributes_type"):
        message = "input should be a table"
    shown = fault.get("input")
    got = f", got {shown!r}" if isinstance(shown, str | int | float | bool) else ""
    if fault["type"] == "bool_type" and str(shown).lower() in ("true", "false"):
        got += f"; write {str(shown).lower()}"
    return f"{key or 'document'}: {message}{got}"


def _spelled(model: type[BaseModel], location: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Return the location as a document spells it, without the tags of unions, and the valid keys beside it."""
    parts: list[str] = []
    fields: list[str] = []
    choice = [model]
    for part in location:
        if len(choice) > 1:  # the member's tag
            choice = [member for member in choice if part in _tags(member)] or choice[:1]
            continue
        parts.append(str(part))
        if isinstance(part, str) and choice:
            known = choice[0].model_fields
            fields = list(known)
            choice = _models_in(known[part].annotation) if part in known else []
    return parts, fields


def _tags(model: type[BaseModel]) -> set[Any]:
    annotations = (field.annotation for field in model.model_fields.values())
    return {tag for a in annotations if typing.get_origin(a) is typing.Literal for tag in typing.get_args(a)}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple, list, typing.Annotated):
        return [model for part in typing.get_args(annotation) for model in _models_in(part)]
    return []
