from __future__ import annotations

import re

import pytest
import torch

from pipelines.training.speed import Cost, find_peak


def test_the_cost_is_reported_once_after_half_a_second_of_updates_without_the_first() -> None:
    now = [0.0]
    cost = Cost(1_234_567, torch.device("cpu"), clock=lambda: now[0])
    told = []
    for done in range(1, 10):
        now[0] += 20.0 if done == 1 else 0.2  # the first update compiles, allocates, ...
        told.append(cost.after(done, 1000))
    assert [text is not None for text in told] == [False] * 3 + [True] + [False] * 5
    threads = torch.get_num_threads()
    form = rf"1,234,567 parameters, cpu, {threads} threads?, [\d,]+ MiB; 1,000 updates: about 3m20s"
    assert re.fullmatch(form, told[3] or ""), told[3]


def test_few_updates_are_reported_at_their_end() -> None:
    now = [0.0]
    cost = Cost(10, torch.device("cpu"), clock=lambda: now[0])
    assert cost.after(1, 2) is None
    now[0] = 0.1
    assert (cost.after(2, 2) or "").endswith("; 2 updates: about 0s")


def test_one_update_has_no_time() -> None:
    assert (Cost(10, torch.device("cpu")).after(1, 1) or "").endswith("; 1 update")


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("no GPU", None),
    ],
)
def test_the_peak_of_a_gpu_follows_from_its_name(gpu: str, peak: float | None) -> None:
    assert find_peak(gpu) == peak


@pytest.mark.parametrize(("gpu", "told"), [("NVIDIA A100-SXM4-80GB", ", MFU 25.0%"), ("no GPU", "")])
def test_utilisation_is_a_share_of_a_known_peak(gpu: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**20)
    now = [0.0]
    cost = Cost(10, torch.device("cuda:0"), flop=lambda: 39e12, clock=lambda: now[0])
    cost.after(1, 3)
    now[0] = 1.0  # two updates of half a second: 78 TFLOP/s
    assert cost.after(3, 3) == f"10 parameters, cuda:0, 1 MiB{told}; 3 updates: about 2s"
