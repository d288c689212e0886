"""Base of every settings model (frozen, keyword-only, no unknown keys), validators that several share, and validation
errors as lines to act on: the key, what was expected, the nearest valid key."""

from __future__ import annotations

import enum
import numbers
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from pipelines.errors import UsageError
from pipelines.nearest import did_you_mean
from pipelines.registry import Registry


def _as_int(value: Any) -> Any:
    """Convert a whole float, as 2e4, and integers of other libraries."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def _as_float(value: Any) -> Any:
    """Convert numbers of other libraries. An integer that is too large for a float is left to the check of types."""
    try:
        return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else value
    except OverflowError:
        return value


_MADE_STRICT = [{"type": "no-info", "function": convert} for convert in (_as_int, _as_float)]


class SettingsModel(BaseModel):
    """Immutable settings; an unknown key is an error, reported together with all others. The repr has only settings
    that differ from their defaults.

    Numbers and booleans are strict: `true` is not 1, and a text is neither. A whole number may be written as a float,
    such as 2e4.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return cls._make_strict(handler(source))

    @classmethod
    def _make_strict(cls, schema: Any) -> Any:
        """Make all numbers and booleans in a validation schema strict. The option `strict` of a model cannot do it: it
        would refuse the list that TOML has for a tuple."""
        if isinstance(schema, list | tuple):
            return type(schema)(map(cls._make_strict, schema))
        if not isinstance(schema, dict) or schema.get("function") in _MADE_STRICT:
            return schema
        kind = schema.get("type")
        if kind in ("int", "float"):
            convert = _as_int if kind == "int" else _as_float
            return no_info_before_validator_function(convert, {**schema, "strict": True})
        if kind == "bool":
            return {**schema, "strict": True}
        return {key: value if key == "default" else cls._make_strict(value) for key, value in schema.items()}

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        fields = type(self).model_fields
        for name, value in super().__repr_args__():
            field = fields.get(name or "")
            if field is None or value != field.get_default(call_default_factory=True, validated_data={}):
                yield name, value


class Change(enum.Enum):
    """What another invocation may change about a run that has begun: a mark in the annotation of a field, or of a whole
    table. Without a mark, another value makes it another experiment.
    """

    PACING = "how fast a stage goes and what it keeps: the scores stay the same"
    TARGET = "how far a stage goes"
    BEHAVIOUR = "how a collect acts: another behaviour is another collector, which counts its own steps"


PACING, TARGET, BEHAVIOUR = Change


def check_count_or_auto(low: int, high: int) -> BeforeValidator:
    """Make a validator of a whole number within limits, or "auto", with one error message for anything else."""

    def check(value: Any) -> Any:
        value = _as_int(value)
        if value == "auto" or (type(value) is int and low <= value <= high):
            return value
        raise PydanticCustomError("count", f"Input should be a whole number from {low} to {high}, or 'auto'")

    return BeforeValidator(check)


def check_known(registry: Registry) -> AfterValidator:
    """Make a validator of the name of a member of `registry`, or of a plug-in `module:attr`."""

    def check(kind: str) -> str:
        if ":" not in kind and kind not in registry.names():
            otherwise = f"known: {', '.join(registry.names())}, or module:attr"
            raise ValueError(
                f"unknown {registry.kind} '{kind}'; {did_you_mean(kind, registry.names(), otherwise=otherwise)}"
            )
        return kind

    return AfterValidator(check)


def describe_errors(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[str]:
    """Write a line for each wrong key in `error`; keys are dotted, starting at `prefix`."""
    unknown: dict[str, str] = {}
    faults: dict[str, list[Any]] = {}
    for fault in error.errors(include_url=False):
        parts, fields = _spell(model, fault["loc"])
        key = ".".join([*([prefix] if prefix else []), *parts])
        if fault["type"] == "extra_forbidden":
            unknown[key] = describe_unknown_key(key, parts[-1], fields)
        faults.setdefault(key, []).append(fault)
    return [unknown.get(key) or f"{key or 'document'}: {_explain(several)}" for key, several in faults.items()]


def _explain(faults: list[Any]) -> str:
    """Explain why one key's value is refused: a fault, or one of each type that the value might have."""
    for fault in faults:
        if fault["type"] == "value_error":  # one of our own messages, which includes the input
            return str(fault["msg"].removeprefix("Value error, "))
    if any(fault["type"] in ("model_type", "model_attributes_type") for fault in faults):
        message = "input should be a table"
    else:  # the empty choice means: not given
        of_type = [fault for fault in faults if not fault["type"].endswith(("_type", "literal_error"))]
        faults = of_type or faults  # where -1 is too small, it is of no use that it is not a text
        first, *others = [fault["msg"][:1].lower() + fault["msg"][1:].replace("'', ", "") for fault in faults]
        message = " or ".join([first, *(other.removeprefix("input should be ") for other in others)])
    given = faults[0].get("input")
    if isinstance(given, str | int | float | bool):
        message += f", got {given!r}"
    if any(fault["type"] == "bool_type" for fault in faults) and str(given).lower() in ("true", "false"):
        message += f"; write {str(given).lower()}"
    return message


def describe_unknown_key(key: str, name: str, known: Iterable[str]) -> str:
    """Write the line for an unknown key; `name` is its last part, `known` its possible spellings."""
    known = sorted(known)
    above = key[: len(key) - len(name)]
    hint = did_you_mean(name, known, prefix=above, otherwise=f"known here: {', '.join(known)}")
    return f"{key}: no such key; {hint}"


def refuse_problems(problems: list[str], source: str) -> None:
    """Raise one UsageError that lists every problem, if there are any."""
    if problems:
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        raise UsageError(f"{count} in the configuration ({source})", problems=tuple(problems))


def _spell(model: type[BaseModel], location: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Spell a location as a document does, without the tags of unions, and list the valid keys beside it."""
    parts: list[str] = []
    fields: list[str] = []
    choice = [model]
    is_choice = False
    for part in location:
        if len(choice) > 1:  # the part is the tag of a member, a value of one of its `Literal` fields
            choice = [
                member
                for member in choice
                if any(part in typing.get_args(field.annotation) for field in member.model_fields.values())
            ] or choice[:1]
            continue
        if is_choice and not choice:
            break  # the rest names a type, of those between which a value may choose
        parts.append(str(part))
        if isinstance(part, str) and choice:
            known = choice[0].model_fields
            fields = list(known)
            annotation = known[part].annotation if part in known else None
            choice = find_models(annotation)
            is_choice = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return parts, fields


def find_models(annotation: Any) -> list[type[BaseModel]]:
    """List the models in an annotation: itself, or the members of its unions and tuples."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple, list, typing.Annotated):
        return [model for part in typing.get_args(annotation) for model in find_models(part)]
    return []
