"""Files made wrong by a seed: bytes, JSON, TOML, npz, HDF5, footers with a right checksum, pickles."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import tomli_w

from pipelines.files.checksums import sealed
from pipelines.lake import footer

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


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        found.append((value, key))
        _places(part, found)
    return found


def odd(document: Any, rng: Random) -> Any:
    """A JSON document with some values, keys or whole parts of other kinds."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        places = _places(document, [])
        if not places or rng.random() < 0.02:
            return rng.choice(ODD)
        where, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind < 5:
            where[key] = rng.choice(ODD)
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


def changed_sealed(path: Path, rng: Random) -> None:
    """As `changed_json`, with the checksums that belong to what it says now."""
    record = json.loads(path.read_bytes())
    record.pop("checksum")
    names = record.pop("files")
    record = odd(record, rng)
    files = {name: (path.parent / name).read_bytes() for name in names}
    path.write_bytes(sealed(record if isinstance(record, dict) else {"x": record}, files))


def resealed(path: Path, change: Callable[[bytes, Random], bytes]) -> Mutation:
    """A change of a file beside `path`, which vouches for it."""

    def apply(file: Path, rng: Random) -> None:
        file.write_bytes(change(file.read_bytes(), rng))
        record = json.loads((file.parent / path).read_bytes())
        record.pop("checksum")
        names = record.pop("files")
        (file.parent / path).write_bytes(sealed(record, {name: (file.parent / name).read_bytes() for name in names}))

    return apply


def odd_pickle(data: bytes, rng: Random) -> bytes:
    import torch

    sink = io.BytesIO()
    if rng.random() < 0.3:
        return scramble(data, rng)
    if rng.random() < 0.3:
        torch.save(rng.choice([[], {}, Path("x"), 7, None, {"optimizer": []}, torch.zeros(3), zipfile.ZipFile]), sink)
        return sink.getvalue()
    state = torch.load(io.BytesIO(data), weights_only=True)
    places = [(w, k) for w, k in _places(state, []) if isinstance(k, str | int)]
    where, key = rng.choice(places)
    where[key] = rng.choice([*ODD, torch.zeros(2), torch.zeros((), dtype=torch.complex64)])
    torch.save(state, sink)
    return sink.getvalue()


def odd_tensors(data: bytes, rng: Random) -> bytes:
    import torch
    from safetensors.torch import load, save

    if rng.random() < 0.4:
        return scramble(data, rng)
    tensors = load(data)
    if not tensors:
        return save({"x": torch.zeros(2)})
    name = rng.choice(sorted(tensors))
    kind = rng.randrange(5)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[f"{name}.x"] = torch.zeros(3)
    else:
        tensors[name] = [torch.zeros(0), torch.zeros((3, 1, 2)), tensors[name].to(torch.int8)][kind - 2]
    return save(tensors)


def changed_toml(path: Path, rng: Random) -> None:
    import tomllib

    text = path.read_text()
    if rng.random() < 0.3:
        path.write_bytes(scramble(path.read_bytes(), rng))
        return
    document = odd(tomllib.loads(text), rng)
    try:
        path.write_text(tomli_w.dumps(document), "utf-8", "surrogatepass")
    except (TypeError, ValueError, AttributeError):
        more = rng.choice(["x = " + "[" * 5000, ".".join("a" * 100_000) + " = 1", "x = nan", "[[stages]]\nstage = 3"])
        path.write_text(f"{more}\n{text}")


def changed_footer(path: Path, rng: Random) -> None:
    """A segment whose header or table of trajectories says other things, with the checksum that fits them."""
    with pa.OSFile(str(path)) as source:
        reader = pa.ipc.open_file(source)
        values, schema = dict(reader.metadata), reader.schema
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        text, packed = values[b"amago"], values[b"trajectories"]
        if rng.random() < 0.5:
            text = json.dumps(odd(json.loads(text), rng)).encode()
        else:
            header = json.loads(text)
            raw = pa.decompress(base64.b64decode(packed), header["trajectories_bytes"], "zstd")
            table = _odd_table(pa.ipc.open_stream(raw).read_all(), rng)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            raw = sink.getvalue().to_pybytes()
            raw = scramble(raw, rng) if rng.random() < 0.3 else raw
            packed = base64.b64encode(pa.compress(raw, "zstd", asbytes=True))
            text = json.dumps({**header, "trajectories_bytes": len(raw)}).encode()
        values |= {b"amago": text, b"trajectories": packed, b"crc": footer._crc(text, packed).encode()}
        sink = pa.BufferOutputStream()
        chosen = rng.choice([batches, batches, batches, batches, [], batches * 2, [b.slice(1) for b in batches]])
        with pa.ipc.new_file(sink, schema, metadata=values) as writer:
            for batch in chosen:
                writer.write_batch(batch)
    path.write_bytes(sink.getvalue().to_pybytes())


def _odd_table(table: pa.Table, rng: Random) -> pa.Table:
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


def odd_schema(path: Path, rng: Random) -> None:
    """Another schema under the name that its content has, and segments that name it."""
    text = json.dumps(odd(json.loads(path.read_bytes()), rng), sort_keys=True, separators=(",", ":"))
    id = hashlib.sha256(text.encode()).hexdigest()[:16]
    (path.parent / f"{id}.json").write_text(text)
    if rng.random() < 0.2:
        changed_bytes(path, rng)
        return
    for segment in path.parents[1].glob("segments/*/*.arrow"):
        if not segment.name.endswith(".blob.arrow"):
            _rename_schema(segment, id)


def _rename_schema(path: Path, id: str) -> None:
    with pa.OSFile(str(path)) as source:
        reader = pa.ipc.open_file(source)
        values, batch = dict(reader.metadata), reader.get_batch(0)
        text = json.dumps({**json.loads(values[b"amago"]), "schema": id}).encode()
        values |= {b"amago": text, b"crc": footer._crc(text, values[b"trajectories"]).encode()}
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, reader.schema, metadata=values) as writer:
            writer.write_batch(batch)
    path.write_bytes(sink.getvalue().to_pybytes())
