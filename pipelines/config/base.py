"""Base of every settings model (frozen, keyword-only, no unknown keys), and validators that several share."""

from __future__ import annotations

import enum
import numbers
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from pipelines.nearest import did_you_mean
from pipelines.registry import Registry


def _make_strict(schema: Any) -> Any:
    """Make all numbers and booleans in a validation schema strict. The option `strict` of a model cannot do it: it
    would refuse the list that TOML has for a tuple."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_make_strict, schema))
    if not isinstance(schema, dict) or schema.get("function") in _MADE_STRICT:
        return schema
    kind = schema.get("type")
    if kind in ("int", "float"):
        convert = _as_int if kind == "int" else _as_float
        return no_info_before_validator_function(convert, {**schema, "strict": True})
    if kind == "bool":
        return {**schema, "strict": True}
    return {key: value if key == "default" else _make_strict(value) for key, value in schema.items()}


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
        return _make_strict(handler(source))

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


def count_or_auto(low: int, high: int) -> BeforeValidator:
    """Return a validator of a whole number within limits, or "auto", with one error message for anything else."""

    def checked(value: Any) -> Any:
        value = _as_int(value)
        if value == "auto" or (type(value) is int and low <= value <= high):
            return value
        raise PydanticCustomError("count", f"Input should be a whole number from {low} to {high}, or 'auto'")

    return BeforeValidator(checked)


def known(registry: Registry, kind: str) -> str:
    """Return `kind` if it names a member of `registry` or a plug-in `module:attr`; else raise ValueError."""
    if ":" not in kind and kind not in registry.names():
        otherwise = f"known: {', '.join(registry.names())}, or module:attr"
        raise ValueError(
            f"unknown {registry.kind} '{kind}'; {did_you_mean(kind, registry.names(), otherwise=otherwise)}"
        )
    return kind
