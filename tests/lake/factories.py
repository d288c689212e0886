"""Lakes and trajectories for tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pipelines.lake.folders import list_all
from pipelines.lake.footer import Footer, hex_uids, read_footer
from pipelines.lake.log import LakeLog, LogEntry, append
from pipelines.lake.overlays import OverlayBatch, OverlayWriter, overlay_uids
from pipelines.lake.reading import Reader
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Discrete, MultiBinary, Ragged, Spaces
from pipelines.lake.storage import LocalStorage
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo

SCHEMA = Schema(Spaces(observation={"obs.state": Box(shape=(3,)), "obs.bits": MultiBinary(n=2)}, action=Discrete(n=5)))
IMAGES = Schema(Spaces(observation={"obs": Box(shape=(20, 20, 3), dtype="uint8")}, action=Box(shape=(2,))))
MIXED = Schema(
    Spaces(
        observation={
            "obs.flag": Box(shape=(), dtype="bool"),
            "obs.wide": Box(shape=(200,), dtype="float64"),
            "obs.grid": Box(shape=(2, 3), dtype="int64"),
        },
        action=Box(shape=(1,)),
    )
)
RAGGED = Schema(
    Spaces(
        observation={"obs.length": Discrete(n=101), "obs": Ragged(max_length=100, dtype="uint8")}, action=Discrete(n=3)
    )
)
INFO = TrajectoryInfo(
    env="maze",
    task="left",
    policy_id="p",
    policy_version=3,
    collector="c0",
    seed=11,
    success=True,
    attempts=(False, True),
    epsilon=0.25,
    goal_text="go left",
    t_start=1.0,
    t_end=2.5,
    tags={"note": "x", "ü": "y"},
)


def columns(rng: np.random.Generator, actions: int, schema: Schema = SCHEMA) -> dict[str, np.ndarray]:
    """Random step columns of a trajectory, with zeros where the arrival convention has them."""
    values = schema.empty(actions + 1)
    for column in schema.columns:
        array = values[column.name]
        if column.role == "flag":
            continue
        if array.dtype.kind == "f":
            array[...] = rng.standard_normal(array.shape)
        else:
            array[...] = rng.integers(0, 2 if array.dtype == bool else 5, array.shape)
        if column.role in ("action", "reward", "logp"):
            array[0] = 0
        if column.role == "label":
            array[-1] = 0
    values["terminated"][-1] = 1
    return values


def fill(
    lake: Lake, lengths: list[int], *, schema: Schema = SCHEMA, seed: int = 0, seal_every: int = 1000
) -> dict[str, dict[str, np.ndarray]]:
    """Append trajectories of these numbers of actions; returns what was written by uid."""
    rng, written = np.random.default_rng(seed), {}
    with lake.writer(schema, seal_seconds=1e9) as writer:
        for i, length in enumerate(lengths):
            values = columns(rng, length, schema)
            info = TrajectoryInfo(env="maze", task=f"t{i % 3}", policy_version=i // 4, success=i % 2 == 0)
            written[writer.append(values, info)] = values
            if (i + 1) % seal_every == 0:
                writer.seal()
    return written


def derive(
    lake: Lake,
    changes: Mapping[str, Mapping[str, np.ndarray]],
    *,
    method: str = "m",
    copy: int = 0,
    offset: int = 0,
    seal_bytes: int = 64 << 20,
) -> list[str]:
    """Derive one trajectory from each base, as `amago relabel` does: it begins at row `offset` of the base and differs
    in the columns given. Returns the new uids, in order. A part of a base also stores its reward and flags.
    """
    with overlay_writer(lake, changes, offset=offset, seal_bytes=seal_bytes) as writer:
        return [append_overlay(lake, writer, base, own, method, copy, offset) for base, own in changes.items()]


def overlay_writer(
    lake: Lake, changes: Mapping[str, Mapping[str, np.ndarray]], *, offset: int = 0, seal_bytes: int = 64 << 20
) -> OverlayWriter:
    """A writer for the columns of `changes`."""
    reader, names = Reader(lake), {name for own in changes.values() for name in own}
    if any(offset or len(next(iter(own.values()))) != reader.read(base).length + 1 for base, own in changes.items()):
        names |= {"reward", "terminated", "truncated"}
    schema = lake.schema(reader.locate(next(iter(changes)))[0].schema_id)
    return OverlayWriter(lake, schema, sorted(names), name="relabel", seal_bytes=seal_bytes)


def append_overlay(
    lake: Lake,
    writer: OverlayWriter,
    base: str,
    own: Mapping[str, np.ndarray],
    method: str = "m",
    copy: int = 0,
    offset: int = 0,
    **said: Any,
) -> str:
    """Append one trajectory derived from `base`; `said` are further fields of its `OverlayBatch`."""
    reader, uid = Reader(lake), np.array([bytes.fromhex(base)], dtype="S16")
    reader.refresh()
    portions = (reader.read_portion(segment.number, uid) for segment in reader.list_originals())
    portion = next(found for found in portions if found is not None)
    rows = len(next(iter(own.values())))
    whole = portion.columns([column.name for column in writer.columns])
    batch = OverlayBatch(
        place=np.array([0]),
        offset=np.array([offset]),
        rows=np.array([rows]),
        columns={name: np.asarray(own.get(name, values[offset : offset + rows])) for name, values in whole.items()},
        **said,
    )
    uids = overlay_uids(uid, method, copy)
    writer.append(portion.id, portion.table, batch, uids, method)
    return hex_uids(uids)[0]


def live_ids(lake: Lake) -> list[str]:
    """Ids of the segments that the log does not hide, sorted."""
    log = LakeLog(lake.storage, lake.id)
    log.refresh()
    return [id for id in list_all(lake.storage) if not log.hides(id)]


def remove(
    lake: Lake,
    *,
    segments: Sequence[str] = (),
    trajectories: Mapping[str, Sequence[str]] | None = None,
    time: float = 0.0,
    reason: str = "test",
) -> None:
    """Enter in the log that segments, or trajectories of others, have expired."""
    some = {id: list(uids) for id, uids in (trajectories or {}).items()}
    append(lake.storage, LogEntry(time=time, reason=reason, segments=list(segments), trajectories=some))


def quarantine(lake: Lake, id: str, damage: Mapping[str, Any] | None = MappingProxyType({})) -> None:
    """Enter in the log that a segment is damaged, or (None) that it no longer is."""
    append(lake.storage, LogEntry(time=0.0, quarantine={id: None if damage is None else dict(damage)}))


def segment_files(lake: Lake) -> list[Path]:
    return sorted((lake.path / "segments").glob("*/*.arrow"))


def damage(lake: Lake, place: int) -> Path:
    """Overwrite the end of a segment, the one at `place` among all; return its file."""
    path = segment_files(lake)[place]
    path.write_bytes(path.read_bytes()[:-200] + bytes(200))
    return path


def footer_at(path: Path) -> Footer:
    """The footer of a segment by its file."""
    return read_footer(LocalStorage(path.parents[2]), f"{path.parent.name}/{path.name.removesuffix('.arrow')}")


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def refuse(code: int) -> Callable[..., int]:
    """A system call that always fails with the error `code`."""

    def call(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


def flip_a_bit(lake: Lake, values: np.ndarray) -> str:
    """Flip one bit of a column's `values`, which one of the lake's segments holds uncompressed; the id of that."""
    for path in sorted((lake.path / "segments").glob("*/*.arrow")):
        content = bytearray(path.read_bytes())
        place = content.find(values.tobytes())
        if place >= 0:
            content[place] ^= 1
            path.write_bytes(content)
            return f"{path.parent.name}/{path.stem}"
    raise AssertionError("no segment holds these values")
