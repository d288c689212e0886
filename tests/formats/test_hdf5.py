"""HDF5 files that point outside are refused, with the name of the dataset, and nothing of the other file is read.
Files whose heaps would keep libhdf5 in an endless loop are refused too."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.settings import SourceSettings
from pipelines.errors import AmagoError, InputMissing, IntegrityError
from pipelines.formats import hdf5
from pipelines.formats.hdf5 import open_file
from pipelines.formats.make import open_importer
from pipelines.formats.minari.episodes import Hdf5Episodes
from tests.cli.conftest import Amago, amago  # noqa: F401
from tests.formats.d4rl_data import flat, write

h5py = pytest.importorskip("h5py")
ROWS = 8


def external_link(file: Any, name: str, secret: Path) -> None:
    file[name] = h5py.ExternalLink(str(secret.with_suffix(".h5")), "/data")


def soft_link_to_an_external_one(file: Any, name: str, secret: Path) -> None:
    file["elsewhere/deep"] = h5py.ExternalLink(str(secret.with_suffix(".h5")), "/")
    file[name] = h5py.SoftLink("/elsewhere/deep/data")


def external_storage(file: Any, name: str, secret: Path) -> None:
    file.create_dataset(name, (ROWS,), "<f4", external=[(str(secret), 0, ROWS * 4)])


def virtual(file: Any, name: str, secret: Path) -> None:
    layout = h5py.VirtualLayout(shape=(ROWS,), dtype="<f4")
    layout[:] = h5py.VirtualSource(str(secret.with_suffix(".h5")), "data", shape=(ROWS,))
    file.create_virtual_dataset(name, layout)


WAYS = [external_link, soft_link_to_an_external_one, external_storage, virtual]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(np.arange(ROWS, dtype="<f4").tobytes())
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        file["data"] = np.arange(ROWS, dtype="<f4")
    return path


def dataset(path: Path, name: str, way: Callable[[Any, str, Path], None], secret: Path) -> Path:
    data = flat([ROWS - 3, 3])
    write(path, data)
    with h5py.File(path, "r+") as file:
        if name in file:
            del file[name]
        way(file, name, secret)
    return path


def rewards(path: Path) -> list[list[float]]:
    source = open_importer(SourceSettings(name=f"d4rl:{path}"))
    return [trajectory.columns["reward"].tolist() for batch in source.batches() for trajectory in batch]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["rewards", "timeouts", "terminals"])
def test_a_dataset_outside_the_file_is_refused(
    amago: Amago,  # noqa: F811
    tmp_path: Path,
    secret: Path,
    way: Callable[[Any, str, Path], None],
    name: str,
) -> None:
    path = dataset(tmp_path / "d.hdf5", name, way, secret)
    refused = amago("collect", "--from", f"d4rl:{path}", "--lake", "lake")
    assert refused.code == 3, refused.err
    assert f"'{'elsewhere/deep' if 'soft' in way.__name__ else name}" in refused.err.replace("'/", "'")
    assert not Path("lake").exists()


@pytest.mark.parametrize("way", WAYS)
def test_metadata_and_infos_are_looked_at_too(
    tmp_path: Path, secret: Path, way: Callable[[Any, str, Path], None]
) -> None:
    path = dataset(tmp_path / "d.hdf5", "metadata/note", way, secret)
    with pytest.raises(InputMissing, match=r"metadata/note|elsewhere/deep"):
        open_importer(SourceSettings(name=f"d4rl:{path}"))


def test_links_within_the_file_are_followed(tmp_path: Path) -> None:
    path = write(tmp_path / "d.hdf5", flat([5, 3]))
    expected = rewards(path)
    with h5py.File(path, "r+") as file:
        file.move("rewards", "kept")
        file["rewards"] = h5py.SoftLink("/kept")
    assert rewards(path) == expected


@pytest.mark.parametrize("link", ["hard", "soft"])
def test_a_group_in_itself_is_refused(tmp_path: Path, link: str) -> None:
    path = write(tmp_path / "d.hdf5", flat([5, 3]))
    with h5py.File(path, "r+") as file:
        group = file.create_group("metadata/a")
        group["again"] = h5py.SoftLink("/metadata") if link == "soft" else file["metadata"]
    with pytest.raises(IntegrityError, match="nested"):
        open_importer(SourceSettings(name=f"d4rl:{path}"))


def test_minari_is_refused_as_well(tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    with h5py.File(folder / "main_data.hdf5", "w") as file:
        file["episode_0/infos/x"] = np.zeros(3)
        file["episode_0/rewards"] = h5py.ExternalLink(str(secret.with_suffix(".h5")), "/data")
    with pytest.raises(AmagoError, match="episode_0/rewards"):
        Hdf5Episodes(folder, [], False)


def with_texts(path: Path, form: str) -> Path:
    """Write a small file of a format, with texts of variable length in attributes or arrays."""
    if form == "robomimic":
        with h5py.File(path, "w") as file:
            file.create_group("data").attrs["env_args"] = '{"env_name": "Lift", "type": 1, "env_kwargs": {}}'
            demo = file.create_group("data/demo_0")
            demo["obs/state"], demo["actions"] = np.zeros((3, 2), "f4"), np.zeros((3, 1), "f4")
            demo["rewards"], demo["dones"] = np.zeros(3, "f4"), np.array([0, 0, 1])
        return path
    write(path, flat([5, 3]))
    with h5py.File(path, "r+") as file:
        file.attrs["amago_spaces"] = "{}"
        file["metadata/algorithm"] = "sac"
    return path


def heap_objects(data: bytearray, start: int) -> list[int]:
    """Find the headers of the objects of the global heap at `start`, where sizes have 8 bytes."""
    end, places = start + int.from_bytes(data[start + 8 : start + 16], "little"), [start + 16]
    while int.from_bytes(data[places[-1] : places[-1] + 2], "little") != 0:
        size = int.from_bytes(data[places[-1] + 8 : places[-1] + 16], "little")
        places.append(places[-1] + 16 + -(-size // 8) * 8)
    assert places[-1] < end
    return places


def read_in_a_child(kind: str, path: Path) -> str:
    """Import a file in a process of its own, which libhdf5 may keep; return the name of what it raised."""
    code = (
        "import resource, sys\n"
        # Seconds of CPU time, however busy the host is. The system then ends the process.
        "resource.setrlimit(resource.RLIMIT_CPU, (30, 30))\n"
        "from pipelines.config.settings import SourceSettings\n"
        "from pipelines.formats.make import open_importer\n"
        "try: list(open_importer(SourceSettings(name=sys.argv[1])).batches())\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code, f"{kind}:{path}"], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.system
@pytest.mark.parametrize("kind", ["d4rl", "robomimic"])
def test_a_heap_without_end_is_refused(tmp_path: Path, kind: str) -> None:
    path = with_texts(tmp_path / "data.hdf5", kind)
    data = bytearray(path.read_bytes())
    place = heap_objects(data, data.index(b"GCOL"))[0]
    data[place : place + 16] = bytes(16)
    path.write_bytes(data)
    said = read_in_a_child(kind, path)
    assert said.startswith("IntegrityError"), said
    assert "heap" in said


@pytest.mark.parametrize(
    ("index", "length"),
    [
        *((0, length) for length in (0, 1, 15, 4_096, 2**63, 2**64 - 1)),
        *((1, length) for length in (4_096, 2**63, 2**64 - 1, 2**64 - 16, 2**64 - 24)),
    ],
)
def test_sizes_of_heap_objects_that_do_not_add_up_are_refused(tmp_path: Path, index: int, length: int) -> None:
    path = with_texts(tmp_path / "data.hdf5", "d4rl")
    data = bytearray(path.read_bytes())
    heap = data.index(b"GCOL")
    for place in heap_objects(data, heap):
        changed = bytearray(data)
        changed[place : place + 2] = index.to_bytes(2, "little")
        changed[place + 8 : place + 16] = length.to_bytes(8, "little")
        path.write_bytes(changed)
        with pytest.raises(IntegrityError, match=f"heap at byte {heap:,}"):
            open_file(path)


@pytest.mark.parametrize("before", [0, 1, 7, 8, 9, 30])
def test_a_heap_is_found_wherever_blocks_of_the_search_end(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    monkeypatch.setattr(hdf5, "_SEARCHED", 8)
    content = b"x" * before + b"GCOL\x01\0\0\0" * 2 + b"GCOL" + b"y" * 9 + b"GCOL\x01\0\0\0"
    found = list(hdf5._find_all(io.BytesIO(content), b"GCOL\x01\0\0\0"))
    assert found == [before, before + 8, before + 29]


@pytest.mark.parametrize("layout", ["earliest", "latest"])
@pytest.mark.parametrize("count", [1, 40, 3_000])
def test_sound_heaps_are_read(tmp_path: Path, layout: str, count: int) -> None:
    path = tmp_path / "data.hdf5"
    texts = ["x" * (number * 7 % 501) for number in range(count)]
    with h5py.File(path, "w", libver=layout) as file:
        file["texts"] = texts
        file["long"] = "y" * 70_000
        file["gone"] = texts
        for number in range(min(count, 60)):
            file.attrs[f"a{number}"] = texts[number]
        # A heap with free space, and one that is no longer there.
        del file["gone"]
        del file.attrs["a0"]
        file["later"] = texts[::-1]
    with open_file(path) as file:
        assert file["texts"].asstr()[()].tolist() == texts
