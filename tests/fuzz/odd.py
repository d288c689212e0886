"""Bytes and JSON made wrong by a seed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Mutation = Callable[[Path, Random], None]
NAN, INF = float("nan"), float("inf")
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e308, NAN, INF),
    *("", "x", "../../x", "/", "a" * 3000, "\0", "\x1b[31m", "é\U0001f642", "module:attr", "nan", "1e9"),
    *([], {}, [[]], [None], ["x"], {"": None}, {"a": {"b": [1]}}, [1] * 500, [[0, "x"], [1]]),
)


def scramble(data: bytes, rng: Random) -> bytes:
    """Bytes with a few bits, a stretch or the end changed."""
    if not data:
        return bytes(rng.randrange(256) for _ in range(9))
    kind, at = rng.randrange(8), rng.randrange(len(data))
    changed = bytearray(data)
    if kind < 3:
        for _ in range(rng.choice([1, 1, 1, 8])):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 3:
        del changed[at:]
    elif kind == 4:
        changed[at : at + 20] = bytes(rng.randrange(256) for _ in range(rng.randrange(40)))
    elif kind == 5:
        changed[at:at] = data[rng.randrange(len(data)) :][:200]
    elif kind == 6:
        changed[at : at + 64] = bytes(min(64, len(data) - at))
    else:
        changed = bytearray(
            rng.choice([b"", b"\0" * 64, b"{}", b"[]", b"[" * 100_000, b"\xff\xfe", b'"', b"1", data * 2])
        )
    return bytes(changed)


def places_in(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        found.append((value, key))
        places_in(part, found)
    return found


def odd(document: Any, rng: Random) -> Any:
    """A JSON document with some values, keys or whole parts of other kinds."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        places = places_in(document, [])
        if not places or rng.random() < 0.02:
            return copy.deepcopy(rng.choice(ODD))
        where, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind < 5:
            where[key] = copy.deepcopy(rng.choice(ODD))
        elif kind == 5:
            del where[key]
        elif kind == 6:
            other, name = rng.choice(places)
            where[key] = json.loads(json.dumps(other[name])) if name in other or isinstance(name, int) else None
        else:
            where[key] = [where[key]]
    return document


def changed_bytes(path: Path, rng: Random) -> None:
    path.write_bytes(scramble(path.read_bytes(), rng))


def changed_json(path: Path, rng: Random) -> None:
    if rng.random() < 0.25:
        changed_bytes(path, rng)
    else:
        path.write_text(json.dumps(odd(json.loads(path.read_bytes()), rng)))
