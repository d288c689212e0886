"""Files of data formats made wrong by a seed: NPZ, HDF5, Parquet, JSON lines, Minari's metadata."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz.odd import INF, NAN, ODD, changed_bytes, changed_json, odd, scramble


def odd_table(table: pa.Table, rng: Random) -> pa.Table:
    name = rng.choice(table.column_names)
    place, rows = table.column_names.index(name), table.num_rows
    kind = rng.randrange(6)
    if kind == 0:
        return table.drop_columns([name])
    if kind == 1:
        return table.slice(0, rng.randrange(rows + 1))
    if kind == 2:
        return pa.concat_tables([table, table])
    whole = [0, -1, 1, 2**40, -(2**63), 2**63 - 1]
    columns = (
        lambda: pa.nulls(rows, table.schema.field(name).type),
        lambda: pa.array([rng.choice(whole) for _ in range(rows)], pa.int64()),
        lambda: pa.array([rng.choice([NAN, INF, -1.5, 1e300]) for _ in range(rows)]),
        lambda: pa.array([rng.choice(["", "x", "\x1b[2J", "a" * 999]) for _ in range(rows)]),
        lambda: pa.array([b"0123456789abcdef"] * rows, pa.binary(16)),
        lambda: pa.array([[True, None]] * rows),
    )
    return table.set_column(place, name, rng.choice(columns)())


def odd_array(values: np.ndarray, rng: Random) -> np.ndarray:
    rows = len(values) if values.ndim else 1
    made: tuple[Callable[[], Any], ...] = (
        lambda: np.zeros(()),
        lambda: np.zeros(0, np.float32),
        lambda: np.array(["text"] * rows),
        lambda: np.array([b"bytes"] * rows),
        lambda: np.zeros((rows, 1, 2, 1, 2)),
        lambda: np.zeros((rows, 2), np.complex64),
        lambda: np.zeros(rows, "M8[s]"),
        lambda: np.zeros(rows, [("a", "f4")]),
        lambda: np.full(rows, NAN),
        lambda: np.full((rows, 3), 2**63, np.uint64),
        lambda: np.zeros(rows + 1),
        lambda: np.zeros(max(rows - 1, 0), bool),
        lambda: np.zeros((0, 3)),
        lambda: np.zeros((rows, 0)),
        lambda: values.astype(">f8") if values.dtype.kind in "biuf" else values,
        lambda: values[::-1] if values.ndim else values,
        lambda: np.full(values.shape, -7),
    )
    return np.asarray(rng.choice(made)())


def changed_npz(path: Path, rng: Random) -> None:
    if rng.random() < 0.25:
        changed_bytes(path, rng)
        return
    with np.load(path, allow_pickle=False) as archive:
        members = {name: archive[name] for name in archive.files}
    name, files = rng.choice(sorted(members)), {}
    kind = rng.randrange(6)
    if kind == 0:
        del members[name]
    elif kind == 1 and "trajectory" in members:
        members["trajectory"] = np.array(json.dumps(odd(json.loads(str(members["trajectory"])), rng)))
    elif kind > 2:
        members[name] = odd_array(members[name], rng)
    for member, values in members.items():
        sink = io.BytesIO()
        np.save(sink, values)
        files[f"{member}.npy"] = sink.getvalue()
    if kind == 2:
        some = f"{name}.npy"
        lying = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({10 ** rng.choice([4, 10, 13, 30])}, 3), }}\n"
        files[some] = rng.choice(
            [
                b"",
                b"not an array",
                b"\x93NUMPY\x01\x00" + len(lying).to_bytes(2, "little") + lying.encode(),
                scramble(files[some], rng),
            ]
        )
        if rng.random() < 0.3:
            files[name] = files.pop(some)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in files.items():
            archive.writestr(member, content)


def changed_hdf5(path: Path, rng: Random) -> None:
    import h5py

    if rng.random() < 0.3:
        changed_bytes(path, rng)
        return
    with h5py.File(path, "r+") as file:
        names: list[str] = []
        file.visititems(lambda name, item: names.append(name))
        name, kind = rng.choice(names), rng.randrange(8)
        if kind == 7 and len(file.attrs):
            key = rng.choice(sorted(file.attrs))
            file.attrs[key] = rng.choice(["", "{", "[]", json.dumps(odd(json.loads(file.attrs[key]), rng)), 7])
            return
        values = file[name][()] if isinstance(file[name], h5py.Dataset) else np.zeros(5)
        del file[name]
        if kind == 0:
            return
        if kind == 1:
            file.create_group(name)
        elif kind == 2:
            file[name] = h5py.Empty("f")
        elif kind == 3:
            ragged = file.create_dataset(name, (len(values) if np.ndim(values) else 2,), h5py.vlen_dtype(np.float32))
            ragged[0] = [1, 2]
        elif kind == 4 and np.asarray(values).dtype.kind == "O":
            texts = ["", "{", "[]", json.dumps(odd({"env": "x", "seed": 1, "tags": {}, "attempts": []}, rng))]
            file[name] = [rng.choice(texts) for _ in values]
        else:
            made = odd_array(np.asarray(values), rng)
            if made.dtype.kind == "U":
                made = made.astype("S")
            if made.dtype.kind not in "MO":
                file[name] = made


def changed_parquet(path: Path, rng: Random) -> None:
    """A table with other columns, or that says other things of them."""
    if rng.random() < 0.2:
        changed_bytes(path, rng)
        return
    table = pq.read_table(path)
    if rng.random() < 0.6:
        table = odd_table(table, rng)
    elif table.schema.metadata and rng.random() < 0.7:
        known = dict(table.schema.metadata)
        name = rng.choice(sorted(known))
        try:
            known[name] = json.dumps(odd(json.loads(known[name]), rng)).encode()
        except ValueError:
            known[name] = scramble(known[name], rng)
        table = table.replace_schema_metadata(known)
    else:
        name = rng.choice(table.column_names)
        at, kind = table.column_names.index(name), table.schema.field(name)
        said = {b"shape": json.dumps(rng.choice(ODD)).encode("utf-8", "surrogatepass")}
        table = table.cast(table.schema.set(at, kind.with_metadata(said)))
    pq.write_table(table, path, row_group_size=rng.choice([1, 3, 100_000]))


def changed_lines(path: Path, rng: Random) -> None:
    """JSON lines of which some say other things, are cut, or come twice."""
    if rng.random() < 0.2:
        changed_bytes(path, rng)
        return
    lines = path.read_bytes().splitlines()
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(len(lines))
        kind = rng.randrange(8)
        if kind < 6:
            try:
                lines[at] = json.dumps(odd(json.loads(lines[at]), rng)).encode("utf-8", "surrogatepass")
            except (ValueError, RecursionError):
                lines[at] = b""
        elif kind == 6:
            lines[at] = scramble(lines[at], rng)
        else:
            lines.insert(rng.randrange(len(lines)), lines[at])
    path.write_bytes(b"\n".join(lines) + b"\n")


def changed_metadata(path: Path, rng: Random) -> None:
    """Metadata of Minari, some of whose values are JSON texts."""
    document = json.loads(path.read_bytes())
    inner = [name for name, value in document.items() if isinstance(value, str) and value.startswith("{")]
    if rng.random() < 0.5 or not inner:
        changed_json(path, rng)
        return
    name = rng.choice(inner)
    document[name] = json.dumps(odd(json.loads(document[name]), rng))
    path.write_text(json.dumps(document))
