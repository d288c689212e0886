"""A flipped byte of an exported dataset is found when it is read again, or changes nothing."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipelines.config.settings import SourceSettings
from pipelines.errors import InputMissing, IntegrityError
from pipelines.formats.archive import NpzArchive
from pipelines.formats.export import export
from pipelines.formats.make import FORMATS, open_importer
from pipelines.lake.schema import Schema
from pipelines.lake.store import Lake
from tests.formats.test_round_trip import IMAGES, MIXED, RAGGED, stored

pytest.importorskip("h5py")
EXPORTED = [name for name, row in FORMATS.items() if row.exporter]
SCHEMAS = {"mixed": MIXED, "images": IMAGES, "ragged": RAGGED}
ABOUT = {"lake": "x", "where": ""}


def dataset(tmp_path: Path, form: str, schema: Schema = MIXED) -> Path:
    """Export three trajectories, one of them long enough for compressed arrays."""
    lake = Lake.create(tmp_path / "lake")
    uids = [trajectory.uid for trajectory in stored(lake, schema, [3, 12, 40])]
    export(lake, uids, tmp_path / "set", form=form, about=ABOUT)
    return tmp_path / "set"


def read(name: str) -> list[tuple[object, ...]]:
    """Every trajectory of a dataset: its columns as bytes, and what is known of it."""
    source = open_importer(SourceSettings(name=name))
    try:
        found: list[tuple[object, ...]] = [(source.spaces,)]
        for batch in source.batches():
            ends = np.cumsum(batch.rows)
            for info, begin, end in zip(batch.infos, ends - batch.rows, ends, strict=True):
                values = {key: (str(v.dtype), v[begin:end].tobytes()) for key, v in sorted(batch.columns.items())}
                found.append((repr(info), values))
        return found
    finally:
        source.close()


def flips(path: Path, count: int) -> Iterator[int]:
    """Flip one bit of each n-th byte of a file in turn; the file is whole again afterwards."""
    content = path.read_bytes()
    for at in range(0, len(content), max(len(content) // count, 1)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        yield at
    path.write_bytes(content)


def altered(path: Path, name: str, count: int, *, values_only: bool = False) -> list[str]:
    """Name the flips of a file after which a dataset is read with other values; those that are refused are fine."""
    before, found = read(name), []
    for at in flips(path, count):
        try:
            after = read(name)
        except IntegrityError as error:
            message = str(error)
        except InputMissing as error:
            message = str(error) if values_only else ""
        else:
            message = path.name
            if (strip(after) != strip(before)) if values_only else after != before:
                found.append(f"{path.name}[{at}]")
        if "\n" in message or not {path.name, path.parent.name, "set"} & set(message.replace("'", "/").split("/")):
            found.append(f"{path.name}[{at}]: {message!r}")
    return found


def strip(trajectories: list[tuple[object, ...]]) -> list[object]:
    """The columns alone."""
    return [trajectory[-1] for trajectory in trajectories[1:]]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.system
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
@pytest.mark.parametrize("form", EXPORTED)
def test_flipped_bytes_are_refused_or_change_nothing(tmp_path: Path, form: str, schema: Schema) -> None:
    to = dataset(tmp_path, form, schema)
    assert not [place for path in files(to) for place in altered(path, f"{form}:{to}", 25)]


@pytest.mark.full
@pytest.mark.parametrize("form", EXPORTED)
def test_every_flipped_byte_is_refused_or_changes_nothing(tmp_path: Path, form: str) -> None:
    to = dataset(tmp_path, form)
    assert not [place for path in files(to) for place in altered(path, f"{form}:{to}", 1_000)]


def test_an_array_that_the_directory_of_an_archive_skips_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, first=np.arange(3), second=np.arange(4), third=np.arange(5))
    content = bytearray(path.read_bytes())
    comment = content.index(b"PK\1\2", content.index(b"PK\1\2") + 1) + 32  # its length, of the second
    content[comment + 1] = 1
    path.write_bytes(content)
    assert zipfile.ZipFile(path).namelist() == ["first.npy", "second.npy"]
    with pytest.raises(IntegrityError, match="2 of 3 arrays"):
        NpzArchive(path)


@pytest.mark.parametrize("text", ["", "{", '{"files": {', "\0"])
def test_a_damaged_list_of_digests_does_not_switch_their_check_off(tmp_path: Path, text: str) -> None:
    to = dataset(tmp_path, "npz")
    (to / "dataset.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"dataset\.json' is damaged"):
        read(f"npz:{to}")


@pytest.mark.system
@pytest.mark.parametrize("form", EXPORTED)
def test_values_have_checksums_of_their_own(tmp_path: Path, form: str) -> None:
    """A file that was copied away from its `dataset.json`."""
    to = dataset(tmp_path, form)
    (to / "dataset.json").unlink()
    [path, *_] = (path for path in files(to) if path.suffix in (".npz", ".hdf5") or path.name.startswith("steps-"))
    assert not altered(path, f"{form}:{to}", 150, values_only=True)
