"""The base of every settings model: frozen, keyword-only, nothing unknown accepted."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SettingsModel(BaseModel):
    """Immutable settings; a key that is not a field is an error, found with all the others."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)
