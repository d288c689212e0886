"""Base of every settings model (frozen, keyword-only, no unknown keys), and validators that several share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

from pipelines.nearest import did_you_mean
from pipelines.registry import Registry


class SettingsModel(BaseModel):
    """Immutable settings; an unknown key is an error, reported together with all others. The repr has only settings
    that differ from their defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        fields = type(self).model_fields
        for name, value in super().__repr_args__():
            field = fields.get(name or "")
            if field is None or value != field.get_default(call_default_factory=True, validated_data={}):
                yield name, value


def count_or_auto(low: int, high: int) -> BeforeValidator:
    """Return a validator of a whole number within limits, or "auto", with one error message for anything else."""

    def checked(value: Any) -> Any:
        if type(value) is float and value.is_integer():
            value = int(value)
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
