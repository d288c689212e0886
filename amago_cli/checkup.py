"""Checks of `amago doctor`. Each one is small and never raises; a failure is a finding."""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from amago_cli import guard
from amago_cli.extras import extras
from amago_cli.version import version

if TYPE_CHECKING:
    import torch

FINE, NOTE, BROKEN = "ok", "note", "broken"
_CORE = ("torch", "gymnasium", "numpy", "pyarrow", "duckdb", "pydantic", "safetensors")
_LOW_DISK = 1 << 30


@dataclass(frozen=True)
class Finding:
    """Result of one check; `status` is ok, note (something is slower or missing) or broken (amago cannot work)."""

    subject: str
    status: str
    detail: str


def findings() -> list[Finding]:
    """Run all checks, most interesting first."""
    return [_amago(), _shadow(), *_versions(), *_compute(), *_extras(), _disk(), _directory()]


def _amago() -> Finding:
    where = Path(__file__).resolve().parent.parent
    return Finding("amago", FINE, f"{version()} at {where}, Python {platform.python_version()}")


def _shadow() -> Finding:
    path = guard.shadow()
    here = Path.cwd() / "pipelines"
    if path is not None:
        return Finding("package pipelines", BROKEN, guard.explain(path))
    if here.is_dir() and here.resolve() != guard.OURS:
        text = f"'{here}' would shadow ours under `python -m`; use the script `amago`"
        return Finding("package pipelines", NOTE, text)
    return Finding("package pipelines", FINE, str(guard.OURS))


def _versions() -> Iterator[Finding]:
    for name in _CORE:
        try:
            yield Finding(name, FINE, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, BROKEN, "not installed; pip install amago")


def _compute() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("device", BROKEN, f"torch cannot be imported: {error}")
        return
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
        yield Finding("device", FINE, f"cuda {torch.version.cuda}: {', '.join(names)}")
    else:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        yield Finding("device", FINE, f"cpu, no CUDA device (torch is {built})")
    from pipelines.config.cores import available_cores, threads

    yield Finding("threads", FINE, f"networks use {threads()} of {available_cores()} available cores")
    yield _attention(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _attention(device: torch.device) -> Finding:
    """Report the usable backends, what "auto" chooses, and what the others lack."""
    import torch

    from pipelines.nets.attention import AttentionWindow, choose, here

    def auto(window: AttentionWindow, packed: bool = False) -> str:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return choose("auto", device, dtype, window, length=1024, packed=packed)

    there = here(device)
    usable = ", ".join(name for name, why in there.items() if why is None)
    chosen = (
        f"auto chooses {auto(AttentionWindow())}, {auto(AttentionWindow(size=64))} for short windows of long contexts, "
    )
    chosen += f"{auto(AttentionWindow(), packed=True)} for packed rows"
    absent = "; ".join(f"{name} {why}" for name, why in there.items() if why is not None)
    return Finding("attention", FINE, f"{usable}; {chosen}" + (f" ({absent})" if absent else ""))


def _extras() -> Iterator[Finding]:
    found = extras()
    usable = ", ".join(extra.name for extra in found if extra.problem is None)
    absent = ", ".join(extra.name for extra in found if extra.problem is not None and not extra.is_found)
    text = f"{usable or 'none'}; not installed: {absent or 'none'}"
    yield Finding("extras", FINE, f'{text} (pip install "amago[NAME]")')
    for extra in found:
        if extra.problem is not None and extra.is_found:
            repair = f'pip install "amago[{extra.name}]"'
            yield Finding(f"extra {extra.name}", NOTE, f"cannot be used: {extra.problem}; {repair}")


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    status = FINE if free >= _LOW_DISK else NOTE
    return Finding("disk", status, f"{free / (1 << 30):.1f} GiB free at {Path.cwd()}")


def _directory() -> Finding:
    try:
        with tempfile.TemporaryFile(dir=Path.cwd()):
            return Finding("working directory", FINE, f"{Path.cwd()} is writable")
    except OSError as error:
        text = f"{Path.cwd()}: {error.strerror}; give --run a writable directory"
        return Finding("working directory", NOTE, text)
