"""The settings that all runs of a sweep or a search share, recorded beside them, so that a repeated command cannot mix
runs of different experiments: they would be ranked together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from pipelines.config.changes import STAGE_TABLES, describe_changes, flatten, is_in
from pipelines.errors import UsageError
from pipelines.files.atomic import write_atomically
from pipelines.files.checksums import read_sealed, seal
from pipelines.files.json import Form
from pipelines.files.malformed import explain_damage

# Texts about a recipe, the report and the trackers do not change a score.
_TABLES = (*(table for table in STAGE_TABLES["run"] if table != "track"), "evaluate", "epochs", "minutes", "seed")


RECORD = "settings.json"


class _Record(Form):
    """Contents of settings.json."""

    settings: dict[str, Any]
    varied: list[str]


def require_shared_settings(
    directory: Path,
    settings: Mapping[str, Any],
    *,
    varied: Collection[str],
    may_change: Callable[[str], bool],
    also: Mapping[str, Any] | None = None,
) -> None:
    """Compare this call's settings with those of the earlier calls in `directory`, and record them if they agree.

    Args:
        settings: resolved document of the recipe, without the values of single runs.
        varied: dotted keys whose values differ between the runs; they are not compared.
        may_change: whether a dotted key may have another value than before.
        also: further values to compare, such as the metric that ranks the runs.

    Raises:
        UsageError: other settings; its problems are the differences.
        IntegrityError: the record was altered or cannot be read.
    """
    path = directory / RECORD
    known = None
    if path.exists():
        with explain_damage(path, hint="restore it from a copy, or choose another --run"):
            known = _Record.model_validate(read_sealed(path))
    every = sorted({*(known.varied if known else ()), *varied})
    wanted = {key: value for key, value in settings.items() if key in _TABLES} | dict(also or {})
    before, after = (
        {key: value for key, value in flatten(document).items() if not is_in(key, every)}
        for document in (known.settings if known else wanted, wanted)
    )
    if changed := describe_changes(before, after, may_change=may_change):
        raise UsageError(
            f"'{directory}' contains runs of other settings",
            hint="repeat the command unchanged, or choose another --run",
            problems=tuple(changed),
        )
    if known is None or every != known.varied:
        write_atomically(path, seal({"settings": wanted, "varied": every}, {}))
