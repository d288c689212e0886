"""Cores as the affinity mask and cgroups of either version grant them; threads as the user says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipelines.config import host


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)


def test_the_second_version_s_limits_hold_from_the_group_up_to_the_root(groups: Path) -> None:
    write(groups / "a/b", cpu_max="max 100000\n", memory_max="4096\n")
    write(groups / "a", cpu_max="250000 100000\n", memory_max="max\n")
    write(groups, cpu_max="800000 100000\n", memory_max="8192\n")
    assert host._read_limits("0::/a/b\n", "cpu") == [2.5, 8.0]
    assert host._read_limits("0::/a/b\n", "memory") == [4096, 8192]


def test_the_first_version_s_limits_hold(groups: Path) -> None:
    write(groups / "cpu/job", cpu_cfs_quota_us="50000\n", cpu_cfs_period_us="100000\n")
    write(groups / "cpu", cpu_cfs_quota_us="-1\n", cpu_cfs_period_us="100000\n")
    write(groups / "memory/job", memory_limit_in_bytes="4096\n")
    membership = "4:memory:/job\n3:cpu,cpuacct:/job\n"
    assert host._read_limits(membership, "cpu") == [0.5]
    assert host._read_limits(membership, "memory") == [4096]


def test_at_least_one_core_is_available_and_no_more_than_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = os.sched_getaffinity(0)
    for quotas, expected in (([0.5], 1), ([1000.0], len(mask)), ([], len(mask))):
        monkeypatch.setattr(host, "_read_limits", lambda *_, quotas=quotas: quotas)
        assert host.count_cores() == expected


def test_memory_is_the_host_s_or_what_a_group_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limits, expected in (([], whole), ([4096, 8192], 4096), ([1 << 62], whole)):
        monkeypatch.setattr(host, "_read_limits", lambda *_, limits=limits: limits)
        assert host.find_memory() == expected


@pytest.mark.parametrize(
    ("said", "wanted", "expected"), [("3", 0, 3), ("3,2", 0, 3), ("3", 5, 5), ("x", 0, 7), ("", 0, 7)]
)
def test_threads_are_as_asked_or_as_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, said: str, wanted: int, expected: int
) -> None:
    monkeypatch.setattr(host, "count_cores", lambda: 7)
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert host.choose_threads(wanted) == expected
