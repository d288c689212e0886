"""Builds and loads `guard.cpp`, by which a CPU build of torch accepts tensors on `cuda:0`.

The library must be loaded before torch, which looks for the hooks of a device once. This module must not import torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

_SOURCE = Path(__file__).with_name("guard.cpp")


def obstacle() -> str | None:
    """Return why the guard cannot be built here; None if it can."""
    if shutil.which("g++") is None:
        return "no g++"
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "this torch is built for CUDA: run the tests marked gpu"
    if not (_torch() / "include" / "ATen" / "ATen.h").exists():
        return "this torch comes without headers"
    return None


def build() -> Path:
    """Compile the guard, unless that was done before for the same torch, and return the library's path."""
    key = hashlib.sha256(_SOURCE.read_bytes() + str(_torch()).encode() + version("torch").encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"amago-fake-cuda-{os.getuid()}" / f"{key}.so"
    if library.exists():
        return library
    library.parent.mkdir(mode=0o700, exist_ok=True)
    own = library.with_name(f"{key}.{os.getpid()}")
    root, lib = _torch(), _torch() / "lib"
    command = ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{root}/include", str(_SOURCE), "-o", str(own)]
    subprocess.run([*command, f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-lc10"], check=True)
    own.replace(library)
    return library


def load() -> None:
    """Load the guard into this process."""
    ctypes.CDLL(str(build()), ctypes.RTLD_GLOBAL)


def _torch() -> Path:
    found = find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
