"""The trajectories of storms: each follows from a key, which its observations carry, so any reader can verify it."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Collection, Mapping

import numpy as np

from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Discrete, Spaces

LONGEST = 16
PLAIN = Schema(
    Spaces(
        observation={"obs.key": Box(shape=(), dtype="int64"), "obs.state": Box(shape=(3,))},
        action=Discrete(n=5),
    )
)
PICTURES = Schema(
    Spaces(
        observation={"obs.key": Box(shape=(), dtype="int64"), "obs.picture": Box(shape=(20, 20, 3), dtype="uint8")},
        action=Discrete(n=5),
    )
)
Columns = Mapping[str, np.ndarray]


def content(key: int, schema: Schema = PLAIN) -> Columns:
    """The one trajectory that belongs to a key; not to be changed. That of -key derives from that of key."""
    return _made(key, schema.id == PICTURES.id)


@functools.lru_cache(maxsize=1 << 12)
def _made(key: int, pictures: bool) -> Columns:
    schema, rng = (PICTURES if pictures else PLAIN), np.random.default_rng(abs(key))
    values = schema.empty(int(rng.integers(2, LONGEST)) + 1)
    values["obs.key"][...] = key
    observation = values[schema.columns[1].name]
    observation[...] = rng.integers(0, 256, observation.shape)
    values["action"][1:] = rng.integers(0, 5, len(values["action"]) - 1)
    values["reward"][1:] = rng.standard_normal(len(values["reward"]) - 1) * (1 if key > 0 else -1)
    values["terminated"][-1] = 1
    return values


def checksum(schema: Schema, columns: Columns, stored: Collection[str] | None = None) -> int:
    """CRC32 over the `stored` columns (None: all) in the schema's order, as the footer has it."""
    crc = 0
    for column in schema.columns:
        if stored is None or column.name in stored:
            crc = zlib.crc32(np.ascontiguousarray(columns[column.name]).tobytes(), crc)
    return crc


def differs(schema: Schema, columns: Columns) -> str | None:
    """What is wrong with a trajectory that was read, or None."""
    expected = content(int(columns["obs.key"][0]), schema)
    wrong = [name for name, values in expected.items() if not np.array_equal(values, columns[name])]
    return f"key {int(columns['obs.key'][0])}: {', '.join(wrong)}" if wrong else None
