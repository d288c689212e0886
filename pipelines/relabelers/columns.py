"""A relabeler that adds a column to what was observed, so that old trajectories and those of an environment that has
since learnt to show more can be trained on together.

`column:NAME:TYPE=VALUE`: TYPE is `float32`, `float32[3]`, `uint8[8,8,3]` and so on, `discrete[5]` for one of 5 choices,
`discrete[3,4]` for a vector of choices, `binary[4]` for bits. VALUE is a number or a SQL expression over the step
columns, the same in all places of an array.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from pipelines.errors import UsageError
from pipelines.lake.spaces import OBSERVATION, Space, convert_to_stored, parse_type
from pipelines.relabelers.base import Context
from pipelines.relabelers.paths import Paths
from pipelines.relabelers.rewards import find_values

_TEXT = re.compile(r"(?P<name>[^:=]+):(?P<type>[^:=]+)=(?P<value>.+)", re.DOTALL)
_EXAMPLE = f"column:{OBSERVATION}.wind:float32[2]=0"


@dataclass(frozen=True, kw_only=True)
class AddedColumn:
    """The observation column `name` of `space`, which `fill(paths)` (R,) gives in each row. `method`: by what name the
    lake knows it."""

    name: str
    space: Space
    reads: tuple[str, ...]
    fill: Callable[[Paths], np.ndarray]
    method: str

    @classmethod
    def from_text(cls, text: str, context: Context) -> AddedColumn:
        """Add a column. UsageError for a wrong text, for one that the steps have already, and while sampling."""
        name, space, value = _parse(text)
        if context.make_labels is None:
            raise UsageError(
                f"train.relabel: 'column:{text}' is not for windows that are being drawn",
                hint=f"store it: amago relabel --with column:{text}",
            )
        if name in context.schema.spaces.observation:
            raise UsageError(f"column:{text}: all steps have a column '{name}' already", hint="choose another name")
        reads, fill = find_values(value, context, needed_by="column", example=_EXAMPLE)
        return cls(name=name, space=space, reads=reads, fill=fill, method=f"column:{text}")

    @property
    def changes(self) -> tuple[str, ...]:
        return (self.name,)

    def relabel(self, paths: Paths) -> Paths:
        """Add the column. UsageError for a value that its type does not have."""
        found = self.fill(paths)
        values = np.broadcast_to(found.reshape(-1, *[1] * len(self.space.shape)), (len(found), *self.space.shape))
        try:
            values = convert_to_stored(values, self.space, (len(found),))
        except ValueError as error:
            raise UsageError(f"{self.method}: {error}", hint="give another value, or another type") from error
        return paths.with_columns({self.name: values})


def find_added(texts: Iterable[str]) -> dict[str, Space]:
    """Return the columns that relabelers of these texts add, by name. UsageError for a wrong text."""
    parsed = [_parse(text.removeprefix("column:")) for text in texts if text.startswith("column:")]
    return {name: space for name, space, _ in parsed}


def _parse(text: str) -> tuple[str, Space, str]:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise UsageError(f"column:{text}: it is not of the form NAME:TYPE=VALUE", hint=f"e.g. --with {_EXAMPLE}")
    name = match["name"].strip()
    if not name.startswith(f"{OBSERVATION}."):
        raise UsageError(f"column:{text}: a column is named {OBSERVATION}.NAME", hint=f"e.g. --with {_EXAMPLE}")
    try:
        return name, parse_type(match["type"]), match["value"].strip()
    except ValueError as error:
        raise UsageError(
            f"column:{text}: {error}",
            hint="give float32, float32[3], uint8[8,8,3], discrete[5], discrete[3,4] or binary[4]",
        ) from error
