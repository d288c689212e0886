"""`env.protocol = "paper"`: a suite's published evaluation protocol, as other defaults of some of its parameters.

A parameter that is given keeps its value under any protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from pipelines.config.base import SettingsModel
from pipelines.errors import InputMissing


class ProtocolSettings(SettingsModel):
    """Base of the parameters of a suite whose defaults differ from what papers evaluate on; `PAPER` says how."""

    PAPER: ClassVar[Mapping[str, Any]] = {}

    protocol: Literal["default", "paper"] = "default"
    """paper: parameters that are not given are those of the published benchmark (docs/environments.md says which)."""

    @model_validator(mode="before")
    @classmethod
    def _apply_protocol(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("protocol") == "paper":
            return {**cls.paper(given), **given}
        return given

    @classmethod
    def paper(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The published values of parameters, where `given` are set."""
        return cls.PAPER


def read_release(package: str) -> tuple[int, ...]:
    """Read (major, minor) of an installed package."""
    return tuple(int(part) for part in metadata.version(package).split(".")[:2])


def refuse_from(package: str, limit: tuple[int, int], *, name: str, why: str) -> None:
    """Raise InputMissing where `package` has release `limit` or a later one."""
    if read_release(package) >= limit:
        wanted = ".".join(map(str, limit))
        raise InputMissing(
            f"environment '{name}': {package} {metadata.version(package)} does not go with it: {why}",
            hint=f'pip install "{package}<{wanted}", best in a fresh virtual environment',
        )
