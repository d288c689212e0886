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

import pyarrow as pa
import tomli_w

from pipelines.files.checksums import checksum, seal
from pipelines.lake import footer, log
from tests.fuzz.datasets import odd_table
from tests.fuzz.odd import ODD, Mutation, changed_bytes, odd, places_in, scramble


def changed_sealed(path: Path, rng: Random) -> None:
    """As `changed_json`, with the checksums that belong to what it says now."""
    record = json.loads(path.read_bytes())
    record.pop("checksum")
    names = record.pop("files")
    record = odd(record, rng)
    files = {name: (path.parent / name).read_bytes() for name in names}
    path.write_bytes(seal(record if isinstance(record, dict) else {"x": record}, files))


def resealed(path: Path, change: Callable[[bytes, Random], bytes]) -> Mutation:
    """A change of a file beside `path`, which vouches for it."""

    def apply(file: Path, rng: Random) -> None:
        file.write_bytes(change(file.read_bytes(), rng))
        record = json.loads((file.parent / path).read_bytes())
        record.pop("checksum")
        names = record.pop("files")
        (file.parent / path).write_bytes(seal(record, {name: (file.parent / name).read_bytes() for name in names}))

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
    places = [(w, k) for w, k in places_in(state, []) if isinstance(k, str | int)]
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
            table = odd_table(pa.ipc.open_stream(raw).read_all(), rng)
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


def changed_log(path: Path, rng: Random) -> None:
    """Entries of the lake's log that say other things, with the checksum that fits them."""
    record = json.loads(path.read_bytes())
    part = rng.choice(["entries", "entries", "entries", "restart"])
    record[part] = odd(record[part], rng)
    path.write_text(json.dumps({**record, "crc": log._compute_crc(record["entries"])}))


def changed_manifest(path: Path, rng: Random) -> None:
    """A manifest with other lines or values, under the name that its content has."""
    content = path.read_bytes()
    path.unlink()
    header, _, values = content.partition(b"\n")
    kind = rng.randrange(3)
    if kind == 0:
        content = scramble(content, rng)
    elif kind == 1:
        content = header + b"\n" + scramble(values, rng)
    else:
        text = json.dumps(odd(json.loads(header), rng)).encode()
        content = text.ljust(len(header)) + b"\n" + values
    path.with_name(f"{checksum(content)[:32]}.manifest").write_bytes(content)


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
