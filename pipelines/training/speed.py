"""Speed and memory of updates: compilation, TF32, recomputation and reuse of freed memory, which keep results, and a
cost estimate."""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from pipelines.config.model import TransformerSettings
from pipelines.config.settings import TrainSettings
from pipelines.events import duration
from pipelines.nets.attention import AttentionWindow, choose
from pipelines.nets.compute import DTYPES

_TIMED_SECONDS = 0.5  # of updates, for the estimate
# glibc's names (malloc.h), and the largest value of the second
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _LARGEST = -1, -3, 1 << 25


def prepare(encoders: list[nn.Module], settings: TrainSettings, device: torch.device, precision: str) -> list[str]:
    """Apply the settings to the encoders; returns what could not be had, in words."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    else:
        keep_freed_memory()
    for encoder in encoders:
        encoder.activation_checkpointing = settings.activation_checkpointing  # type: ignore[assignment]
    if not settings.compile:
        return []
    reason = _why_not_compiled(device)
    if reason is not None:
        return [f"train.compile: cannot compile here ({reason}); going on without"]
    for encoder in encoders:
        encoder.compile()
    return []


def keep_freed_memory() -> None:
    """Let this process keep up to 64 MiB of freed memory, where the C library is glibc.

    By default glibc returns a freed tensor of a few hundred kilobytes to the system, which clears its pages each time
    that they are allocated again: over 300 page faults in an update of continuous actions, against less than one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)


def _why_not_compiled(device: torch.device) -> str | None:
    """The first line of what the compiler says when asked for something trivial; None if it works."""
    try:
        torch.compile(lambda x: x * 2 + 1, dynamic=False)(torch.ones(4, device=device))
    except Exception as error:  # whatever a toolchain may raise
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    finally:
        torch.compiler.reset()
    return None


def describe(
    sequence: nn.Module, settings: TrainSettings, device: torch.device, *, precision: str, compiled: bool
) -> dict[str, Any]:
    """What a run computes with, for its record."""
    facts: dict[str, Any] = {"device": str(device), "precision": precision, "compiled": compiled}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    window = getattr(sequence, "window", None)
    if isinstance(window, AttentionWindow):
        dtype = DTYPES[precision]
        if device.type == "cpu":
            dtype = torch.float32  # see attention.attend
        length, model = settings.resolved_context_length + 1, cast(TransformerSettings, sequence.settings)
        window = replace(window.within(length), dropout=model.dropout_attention)
        facts["attention"] = choose(
            model.attention, device, dtype, window, length=length, packed=settings.packing,
            head=model.d_model // model.num_heads,
        )  # fmt: skip
    return facts


# TFLOP/s of products of dense bf16 matrices, by data sheets. The first name that is part of a GPU's counts.
_PEAKS = {
    "B200": 2250, "H200 NVL": 835, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "A40": 150,
    "A10": 125, "L40S": 362, "L4": 121, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip


def find_peak(gpu: str) -> float | None:
    """Find the FLOP/s of bf16 products of a GPU by its name; None for one that is not in the table."""
    known = (name for name in _PEAKS if re.search(rf"\b{name}\b(?! (Ti|D|Laptop))", gpu))
    name = next(known, None)
    return None if name is None else _PEAKS[name] * 1e12


class Cost:
    """Estimate of what training costs: parameters, device, threads, memory and time; on a GPU whose peak is known also
    MFU, the share of it that updates reach.

    Memory is the peak so far: on CUDA of allocated tensors, else of the whole process. `flop` counts what an update
    cannot do without.
    """

    def __init__(
        self, parameters: int, device: torch.device, *, flop: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._parameters, self._device, self._flop, self._clock = parameters, device, flop, clock
        self._began, self._is_reported = 0.0, False

    def after(self, done: int, total: int) -> str | None:
        """Return the estimate once, after half a second of updates, and None otherwise. The first update is not timed,
        because it also allocates and compiles.
        """
        if self._is_reported:
            return None
        now = self._clock()
        if done <= 1:
            self._began = now
        if done < total and (done < 2 or now - self._began < _TIMED_SECONDS):
            return None
        self._is_reported = True
        seconds = (now - self._began) / (done - 1) if done > 1 else None
        count = f"{total:,} update{'s' * (total != 1)}"
        parts = [f"{self._parameters:,} parameters", self._where(), *self._memory()]
        peak = find_peak(torch.cuda.get_device_name(self._device)) if self._device.type == "cuda" else None
        if self._flop and peak and seconds:
            parts.append(f"MFU {self._flop() / seconds / peak:.1%}")
        return f"{', '.join(parts)}; {count}" + (f": about {duration(total * seconds)}" if seconds is not None else "")

    def _where(self) -> str:
        threads = torch.get_num_threads()
        return str(self._device) + (f", {threads} thread{'s' * (threads != 1)}" if self._device.type == "cpu" else "")

    def _memory(self) -> list[str]:
        is_cuda = self._device.type == "cuda"
        used = torch.cuda.max_memory_allocated(self._device) if is_cuda else _resident_bytes()
        return [f"{used / 2**20:,.0f} MiB"] if used else []


def _resident_bytes() -> int:
    """Return the peak memory of this process; 0 where the system does not report it."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
