"""Checks of `amago doctor`. A check never raises: a failure is a finding.

An optional extra is usable if its requirements are installed in suitable versions and its modules import.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from amago_cli import guard
from amago_cli.version import version

FINE, NOTE, BROKEN = "ok", "note", "broken"
_CORE = ("torch", "gymnasium", "numpy", "pyarrow", "duckdb", "pydantic", "safetensors")
_LOW_DISK = 1 << 30
# Modules to import per extra; those of environment extras come from their suites.
_MODULES = {
    "tune": ("optuna",),
    "box2d": ("Box2D",),
    "flash": ("flash_attn",),
    "hdf5": ("h5py",),
    "hub": ("huggingface_hub",),
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


@dataclass(frozen=True)
class Finding:
    """Result of one check; `status` is ok, note (something is slower or missing) or broken (amago cannot work)."""

    subject: str
    status: str
    detail: str


def find_problems() -> Iterator[Finding]:
    """Run all checks, the most interesting first. Every check yields findings, also where all is well."""
    here = Path.cwd()
    where = Path(__file__).resolve().parent.parent
    yield Finding("amago", FINE, f"{version()} at {where}, Python {platform.python_version()}")
    folder = here / "pipelines"
    if (path := guard.shadow()) is not None:
        yield Finding("package pipelines", BROKEN, guard.explain(path))
    elif folder.is_dir() and folder.resolve() != guard.OURS:
        text = f"'{folder}' would shadow ours under `python -m`; use the script `amago`"
        yield Finding("package pipelines", NOTE, text)
    else:
        yield Finding("package pipelines", FINE, str(guard.OURS))
    for name in _CORE:
        try:
            yield Finding(name, FINE, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, BROKEN, "not installed; pip install amago")
    yield from _check_compute()
    found = find_extras()
    usable = ", ".join(extra.name for extra in found if extra.problem is None)
    absent = ", ".join(extra.name for extra in found if extra.problem is not None and not extra.is_found)
    text = f"{usable or 'none'}; not installed: {absent or 'none'}"
    yield Finding("extras", FINE, f'{text} (pip install "amago[NAME]")')
    for extra in found:
        if extra.problem is not None and extra.is_found:
            repair = f'pip install "amago[{extra.name}]"'
            yield Finding(f"extra {extra.name}", NOTE, f"cannot be used: {extra.problem}; {repair}")
    free = shutil.disk_usage(here).free
    yield Finding("disk", FINE if free >= _LOW_DISK else NOTE, f"{free / (1 << 30):.1f} GiB free at {here}")
    try:
        with tempfile.TemporaryFile(dir=here):
            yield Finding("working directory", FINE, f"{here} is writable")
    except OSError as error:
        text = f"{here}: {error.strerror}; give --run a writable directory"
        yield Finding("working directory", NOTE, text)


def _check_compute() -> Iterator[Finding]:
    """Report the device, threads and attention backends: what "auto" chooses, and what the others lack."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("device", BROKEN, f"torch cannot be imported: {error}")
        return
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        names = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
        yield Finding("device", FINE, f"cuda {torch.version.cuda}: {', '.join(names)}")
    else:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        yield Finding("device", FINE, f"cpu, no CUDA device (torch is {built})")
    from pipelines.config.host import choose_threads, count_cores
    from pipelines.nets.attention import AttentionWindow, choose, list_obstacles

    yield Finding("threads", FINE, f"networks use {choose_threads()} of {count_cores()} available cores")
    device = torch.device("cuda" if has_gpu else "cpu")

    def auto(window: AttentionWindow, packed: bool = False) -> str:
        dtype = torch.bfloat16 if has_gpu else torch.float32
        return choose("auto", device, dtype, window, length=1024, packed=packed)

    there = list_obstacles(device)
    usable = ", ".join(name for name, why in there.items() if why is None)
    chosen = (
        f"auto chooses {auto(AttentionWindow())}, {auto(AttentionWindow(size=64))} for short windows of long contexts, "
        f"{auto(AttentionWindow(), packed=True)} for packed rows"
    )
    absent = "; ".join(f"{name} {why}" for name, why in there.items() if why is not None)
    yield Finding("attention", FINE, f"{usable}; {chosen}" + (f" ({absent})" if absent else ""))


@dataclass(frozen=True, kw_only=True)
class Extra:
    """An optional extra. `problem` is None if it is usable; `is_found`: its main module is installed, usable or not."""

    name: str
    problem: str | None
    is_found: bool


def find_extras() -> list[Extra]:
    """Check the extras of amago, as the package's own metadata lists them."""

    def check(name: str) -> Extra:
        problems = dict.fromkeys(_find_unmet("amago", name, set()))
        missing = [problem for problem in problems if problem is not None]
        if not problems:
            missing = [f"it contains nothing for Python {sys.version_info.major}.{sys.version_info.minor}"]
        imported = list_modules(name)
        problem = "; ".join(missing) or _explain_import(imported)
        return Extra(name=name, problem=problem, is_found=any(find_spec(module) is not None for module in imported[:1]))

    try:
        names = metadata.metadata("amago").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return []
    with ThreadPoolExecutor(4) as pool:  # each check imports in a process of its own
        return list(pool.map(check, names))


def list_modules(extra: str) -> tuple[str, ...]:
    """List the modules that using `extra` imports."""
    from pipelines.envs.suites.catalogue import ENTRIES

    found = [module for entry in ENTRIES if entry.extra == extra for module in entry.requires]
    return tuple(dict.fromkeys((*_MODULES.get(extra, ()), *found)))


def _find_unmet(distribution: str, extra: str, seen: set[tuple[str, str]]) -> Iterator[str | None]:
    """Yield the problem, or None, of each requirement of `distribution[extra]` and of the extras that it names."""
    if (distribution, extra) in seen:
        return
    seen.add((distribution, extra))
    for text in metadata.requires(distribution) or ():
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            continue
        if not wanted.marker.evaluate({"extra": extra}):
            continue
        name, problem = canonicalize_name(wanted.name), None
        if name != "amago":
            try:
                version = metadata.version(wanted.name)
                if not wanted.specifier.contains(version, prereleases=True):
                    problem = f"{wanted.name} is {version}, not {wanted.specifier}"
            except metadata.PackageNotFoundError:
                problem = f"{wanted.name} is not installed"
            yield problem
        for inner in sorted(wanted.extras) if problem is None else ():
            yield from _find_unmet(name, inner, seen)


def _explain_import(names: Sequence[str]) -> str | None:
    """Say why the modules `names` cannot be imported; None if they can.

    They are imported in a separate process, since a broken library may end the process that imports it.
    """
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
