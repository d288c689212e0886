"""Optional extras that are usable here: their requirements are installed in suitable versions and import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Modules to import per extra; those of environment extras come from their suites.
_MODULES = {
    "tune": ("optuna",),
    "box2d": ("Box2D",),
    "flash": ("flash_attn",),
    "hdf5": ("h5py",),
    "minari": ("minari",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "peers": ("stable_baselines3", "sb3_contrib"),
    "ray": ("ray",),
    "mlflow": ("mlflow",),
    "serve": ("starlette", "uvicorn", "websockets", "httptools", "orjson"),
    "stores": ("obstore",),
    "tensorboard": ("tensorboard", "PIL"),
    "trackio": ("trackio",),
    "video": ("av",),
    "view": ("starlette", "uvicorn"),
    "wandb": ("wandb",),
}
_SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class Extra:
    """An optional extra; `problem` is None if it is usable; `is_found`: its main module is installed, usable or not."""

    name: str
    problem: str | None
    is_found: bool


def extras() -> list[Extra]:
    """Return the extras of amago, from the package's own metadata."""
    try:
        names = metadata.metadata("amago").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return []
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(_extra, names))


def modules(extra: str) -> tuple[str, ...]:
    """Return the modules that using `extra` imports."""
    from pipelines.envs.suites.catalogue import ENTRIES

    found = [module for entry in ENTRIES if entry.extra == extra for module in entry.requires]
    return tuple(dict.fromkeys((*_MODULES.get(extra, ()), *found)))


def _extra(name: str) -> Extra:
    problems = dict.fromkeys(_problems("amago", name, set()))
    missing = [problem for problem in problems if problem is not None]
    if not problems:
        missing = [f"it contains nothing for Python {sys.version_info.major}.{sys.version_info.minor}"]
    imported = modules(name)
    problem = "; ".join(missing) or _broken(imported)
    return Extra(name=name, problem=problem, is_found=any(find_spec(module) is not None for module in imported[:1]))


def _problems(distribution: str, extra: str, seen: set[tuple[str, str]]) -> Iterator[str | None]:
    """Yield the problem (None: none) of each requirement of `distribution[extra]` and of the extras that it names."""
    if (distribution, extra) in seen:
        return
    seen.add((distribution, extra))
    for text in metadata.requires(distribution) or ():
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            continue
        if not wanted.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(wanted.name)
        problem = None if name == "amago" else _unmet(wanted)
        if name != "amago":
            yield problem
        for inner in sorted(wanted.extras) if problem is None else ():
            yield from _problems(name, inner, seen)


def _unmet(wanted: Requirement) -> str | None:
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name} is not installed"
    if wanted.specifier.contains(version, prereleases=True):
        return None
    return f"{wanted.name} is {version}, not {wanted.specifier}"


def _broken(names: Sequence[str]) -> str | None:
    """Return why the modules `names` cannot be imported, tried in a separate process; None if they can."""
    if not names:
        return None
    command = [sys.executable, "-P", "-W", "ignore", "-c", f"import {', '.join(names)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"import {', '.join(names)} takes more than {_SECONDS} s"
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return f"import {', '.join(names)} fails: {last}"
