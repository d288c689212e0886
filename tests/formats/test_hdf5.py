"""HDF5 files that point outside: refused, with the name of the dataset, and nothing of the other file is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.source import SourceSettings
from pipelines.errors import AmagoError, InputMissing, IntegrityError
from pipelines.formats.make import open_importer
from pipelines.formats.minari.hdf5 import Hdf5Episodes
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
