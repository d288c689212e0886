from __future__ import annotations

import re

import torch

from pipelines.training.speed import Cost


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
