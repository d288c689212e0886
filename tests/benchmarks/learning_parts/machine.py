"""What results were measured on, and with which code."""

from __future__ import annotations

import subprocess
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def gemm_gflops(seconds: float = 1.0, size: int = 512) -> float:
    """Measure float32 products on one thread; the best of a few rounds, in GFLOP/s."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.randn(size, size), torch.randn(size, size)
    rates: list[float] = []
    until = time.perf_counter() + seconds
    while not rates or time.perf_counter() < until:
        begun = time.process_time()
        for _ in range(16):
            torch.mm(a, b)
        rates.append(16 * 2 * size**3 / (time.process_time() - begun) / 1e9)
    return round(max(rates), 1)


def code(root: Path = ROOT) -> dict[str, str]:
    """Read the version of a checkout and its commit, with a + where tracked files differ from it; "" outside of git."""
    version = str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])
    try:
        commit = _git(root, "rev-parse", "--short=10", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return {"version": version, "commit": ""}
    return {"version": version, "commit": commit + "+" * bool(changed)}


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
