"""Input that no format takes: pipes in place of files, flags that are NaN."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.config.settings import SourceSettings
from pipelines.errors import AmagoError, IntegrityError
from pipelines.formats.make import open_importer
from tests.formats.d4rl_data import flat, without, write
from tests.formats.test_npz import write_amago


def read(name: str) -> None:
    source = open_importer(SourceSettings(name=name))
    try:
        for _ in source.batches():
            pass
    finally:
        source.close()


@pytest.mark.parametrize(
    ("pipe", "name"),
    [
        ("x.npz", "npz:x.npz"),
        ("set/x.npz", "npz:set"),
        ("x.hdf5", "hdf5:x.hdf5"),
        ("x.hdf5", "robomimic:x.hdf5"),
        ("set/x.h5", "d4rl:set"),
        ("x.parquet", "parquet:x.parquet"),
        ("x.parquet", "parquet:*.parquet"),
        ("set/x.parquet", "parquet:set"),
        ("x.arrow", "arrow:x.arrow"),
        ("set/data/metadata.json", "minari:set"),
        ("set/metadata.json", "minari:set"),
        ("set/meta/info.json", "lerobot:set"),
    ],
)
def test_a_pipe_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipe: str, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(pipe).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(pipe)
    with pytest.raises(AmagoError, match=r"not a regular file|no data/metadata.json|no file") as caught:
        read(name)
    assert "\n" not in caught.value.message


def _flat(folder: Path, terminals: np.ndarray) -> str:
    return f"hdf5:{write(folder / 'x.hdf5', {**flat([3, 2]), 'terminals': terminals})}"


def _masks(folder: Path, terminals: np.ndarray) -> str:
    data = flat([3, 2])
    data["dones_float"] = data.pop("timeouts") | data.pop("terminals")
    np.savez(folder / "x.npz", masks=1 - terminals, **data)
    return f"npz:{folder / 'x.npz'}"


def _demonstration(folder: Path, terminals: np.ndarray) -> str:
    data = {"actions": np.zeros((5, 2)), "dones": terminals, "obs/x": np.zeros((5, 3)), "rewards": np.zeros(5)}
    return f"robomimic:{write(folder / 'x.hdf5', {f'data/demo_0/{name}': values for name, values in data.items()})}"


def _rows(folder: Path, terminals: np.ndarray) -> str:
    pq.write_table(
        pa.table({"obs": np.zeros(5), "action": np.zeros(5), "reward": np.zeros(5), "terminated": terminals}),
        folder / "x.parquet",
    )
    return f"parquet:{folder / 'x.parquet'}"


def _amago(folder: Path, terminals: np.ndarray) -> str:
    observed = {"_OBS_KEY_observation": np.zeros((6, 2))}
    np.savez(folder / "x.npz", actions=np.zeros((5, 2)), rews=np.zeros(5), dones=terminals, **observed)
    return f"npz:{folder / 'x.npz'}"


def _minari(folder: Path, terminals: np.ndarray) -> str:
    box = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1, -1], "high": [1, 1]}
    spaces = {f"{name}_space": json.dumps(box) for name in ("observation", "action")}
    (folder / "data").mkdir()
    (folder / "data" / "metadata.json").write_text(json.dumps({"total_episodes": 1, "total_steps": 5, **spaces}))
    data = {"observations": np.zeros((6, 2)), "actions": np.zeros((5, 2)), "rewards": np.zeros(5)}
    data |= {"terminations": terminals, "truncations": np.zeros(5)}
    write(folder / "data" / "main_data.hdf5", {f"episode_0/{name}": values for name, values in data.items()})
    return f"minari:{folder}"


@pytest.mark.parametrize("make", [_flat, _masks, _demonstration, _rows, _amago, _minari])
@pytest.mark.parametrize(("value", "shown"), [(0.0, ""), (np.nan, "NaN"), (-1, "-1"), (0.7, "0.7")])
def test_a_flag_is_0_or_1(tmp_path: Path, make: Callable[[Path, np.ndarray], str], value: float, shown: str) -> None:
    terminals = np.array([0, 0, value, 0, 1], dtype=np.float64)
    name = make(tmp_path, terminals)
    if value == 0:
        read(name)
        return
    shown = f"{1 - value:g}" if make is _masks and value == value else shown
    with pytest.raises(IntegrityError, match=f"is {shown} at row 2, not 0 or 1") as caught:
        read(name)
    assert "x.hdf5" in caught.value.message or str(tmp_path) in caught.value.message
    assert "\n" not in caught.value.message


def _claims(shape: str) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


MEMBERS: dict[str, np.ndarray | bytes | None] = {
    "short": np.ones((2, 1), np.float32),
    "0-d": np.zeros((), np.float32),
    "empty": np.zeros((0, 1), np.float32),
    "text": np.array(["text"] * 4),
    "5-d": np.zeros((4, 1, 2, 1, 2), np.float32),
    "terabytes": _claims("(10000000000000,)"),
    "no .npy": None,
}


@pytest.mark.parametrize("member", ["_OBS_KEY_observation", "actions", "rews", "dones"])
@pytest.mark.parametrize("kind", MEMBERS)
def test_an_odd_member_of_an_npz_file_is_one_line(tmp_path: Path, kind: str, member: str) -> None:
    path, odd = tmp_path / "x.npz", MEMBERS[kind]
    write_amago(path, np.zeros((4, 2)))
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    content = files.pop(f"{member}.npy")
    if isinstance(odd, np.ndarray):
        sink = io.BytesIO()
        np.save(sink, odd)
        content = sink.getvalue()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{member}{'' if odd is None else '.npy'}", odd if isinstance(odd, bytes) else content)
    if kind == "no .npy" or (kind, member) == ("5-d", "actions"):
        read(f"npz:{path}")  # an array is found by its name alone, too, and a value may have any shape
        return
    with pytest.raises(AmagoError, match=r"x\.npz'") as caught:
        read(f"npz:{path}")
    assert "\n" not in caught.value.message


def _ragged(file: Any) -> None:
    file.create_dataset("rewards", (5,), h5py.vlen_dtype(np.float32))[0] = [1, 2]


REWARDS: dict[str, Callable[[Any], None]] = {
    "text": lambda file: file.create_dataset("rewards", data=np.array([b"x"] * 5)),
    "two a step": lambda file: file.create_dataset("rewards", data=np.zeros((5, 2))),
    "ragged": _ragged,
    "complex": lambda file: file.create_dataset("rewards", data=np.zeros(5, np.complex64)),
    "a group": lambda file: file.create_group("rewards"),
}


@pytest.mark.parametrize("kind", REWARDS)
def test_odd_rewards_of_an_hdf5_file_are_one_line(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "x.hdf5", without(flat([3, 2]), "rewards"))
    with h5py.File(path, "r+") as file:
        REWARDS[kind](file)
    with pytest.raises(AmagoError, match="reward") as caught:
        read(f"d4rl:{path}")
    assert "x.hdf5" in caught.value.message
    assert "\n" not in caught.value.message


def test_an_empty_group_of_observations_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf5", without(flat([3, 2]), "observations", "next_observations"))
    with h5py.File(path, "r+") as file:
        file.create_group("observations")
    with pytest.raises(AmagoError, match=r"x\.hdf5.*observations") as caught:
        read(f"d4rl:{path}")
    assert "\n" not in caught.value.message
