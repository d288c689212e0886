"""The base of every settings model: frozen, keyword-only, nothing unknown accepted."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError


class SettingsModel(BaseModel):
    """Immutable settings; a key that is not a field is an error, found with all the others."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)


def count_or_auto(low: int, high: int) -> BeforeValidator:
    """Return a validator of a whole number within limits, or "auto", with one complaint about anything else."""

    def checked(value: Any) -> Any:
        if type(value) is float and value.is_integer():
            value = int(value)
        if value == "auto" or (type(value) is int and low <= value <= high):
            return value
        raise PydanticCustomError("count", f"Input should be a whole number from {low} to {high}, or 'auto'")

    return BeforeValidator(checked)
