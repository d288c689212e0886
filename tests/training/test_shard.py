"""`train.shard = "host"`: the ranks of each host draw from files of their own. Two hosts are two processes here, which
a launcher's environment calls so."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.host import find_host_ranks
from pipelines.data.mixture import Mixture, Share
from pipelines.data.view import View
from pipelines.errors import UsageError
from pipelines.lake.store import Lake
from pipelines.nets import ranks
from tests.ranks import COMMAND, environment, find_free_port, lines, small_lake, words

UPDATES, BATCH, WINDOW = 6, 16, 16


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_lake(tmp_path_factory.mktemp("shard") / "lake")


def on_two_hosts(
    lake: Path, run: Path, *options: str, without: str = "", **settings: object
) -> list[subprocess.CompletedProcess[str]]:
    """Call `amago train` as one rank on each of two hosts."""
    port = str(find_free_port())
    chosen = {"train__shard": "host", "train__batch_size": BATCH, "train__rank_timeout": 600, **settings}
    command = [*COMMAND, *words(lake, run, "--steps", str(UPDATES), *options, **chosen), "--output", "json"]
    started = []
    for number in ("0", "1"):
        launcher = {"RANK": number, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        launcher |= {"GROUP_RANK": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        launcher.pop(without, None)
        started.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment() | launcher,
                cwd=lake.parent,
            )
        )
    ends = [process.communicate(timeout=600) for process in started]
    return [
        subprocess.CompletedProcess(command, process.returncode, *end)
        for process, end in zip(started, ends, strict=True)
    ]


def steps_of(lake: Path, spans: list[tuple[float, float]]) -> list[int]:
    """Steps after each update, if micro-batch n is drawn from span n % 2, worked out without a trainer."""
    opened = Lake(lake)
    [schema] = opened.schemas()
    hosts = [Mixture([(View(opened, schema), Share())], length=WINDOW, seed=0, span=span) for span in spans]
    for host in hosts:
        host.refresh(0)
    found, total = [], 0
    for update in range(UPDATES):
        for number in range(4):
            batch = hosts[number % len(hosts)].sample(BATCH // 4, update, number)
            total += int((batch.lengths - 1).sum())
        found.append(total)
    return found


@pytest.mark.system
def test_each_host_draws_from_its_own_span(tmp_path: Path, lake: Path) -> None:
    for done in on_two_hosts(lake, tmp_path / "run"):
        assert done.returncode == 0, done.stderr
    halves, whole = steps_of(lake, [(0.0, 0.5), (0.5, 1.0)]), steps_of(lake, [(0.0, 1.0)])
    assert halves != whole
    assert [line["steps_seen"] for line in lines(tmp_path / "run")] == halves


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("way", ["priorities", "mixture", "follow"])
def test_every_way_of_drawing_works_on_two_hosts_and_resumes(tmp_path: Path, lake: Path, way: str) -> None:
    """Priorities of both hosts stay alike, or ranks would draw from other spans than they believe."""
    settings: dict[str, Any] = {"train__per_alpha": 0.6} if way == "priorities" else {}
    options = ["--follow"] if way == "follow" else []
    if way == "mixture":
        options = ["--from-lake", f"{small_lake(tmp_path / 'other')}:2"]
    for run, parts in (("whole", [UPDATES]), ("parts", [3, UPDATES])):
        for steps in parts:
            more = {**settings, "train__steps": steps}
            for done in on_two_hosts(lake, tmp_path / run, *options, "--steps", str(steps), **more):
                assert done.returncode == 0, done.stderr
    names = ("update", "steps_seen", "loss", "grad_norm")
    one, other = ([[line[name] for name in names] for line in lines(tmp_path / run)] for run in ("whole", "parts"))
    assert one == other


@pytest.mark.full
def test_a_launcher_that_does_not_name_hosts_is_refused(tmp_path: Path, lake: Path) -> None:
    first, _ = on_two_hosts(lake, tmp_path / "run", without="LOCAL_WORLD_SIZE")
    assert first.returncode == 2
    assert "train.shard = 'host' needs to know which ranks share a host" in first.stderr
    assert first.stderr.count("error: ") == 1
    assert json.loads(first.stdout)["error"]["exit_code"] == 2


@pytest.mark.parametrize(
    ("hosts", "own", "expected"),
    [
        ([range(2), range(2)], range(2), (0.0, 1.0)),
        ([range(2), range(2), range(2, 4), range(2, 4)], range(2, 4), (0.5, 1.0)),
        ([range(3), range(3), range(3), range(3, 4)], range(3), (0.0, 0.75)),
        ([range(1), range(1)], range(1), None),  # two hosts that are both the first
        ([range(1), range(2, 3)], range(1), None),
        ([range(0), range(0)], range(0), None),  # the launcher does not say
    ],
)
def test_spans_are_in_proportion_to_ranks_and_divide_the_lake(
    monkeypatch: pytest.MonkeyPatch, hosts: list[range], own: range, expected: tuple[float, float] | None
) -> None:
    monkeypatch.setattr(ranks, "gather", lambda value: hosts if isinstance(value, range) else [value])
    monkeypatch.setattr(ranks, "find_host_ranks", lambda: own)
    monkeypatch.setattr(ranks, "count_joined", lambda: len(hosts))
    if expected is None:
        with pytest.raises(UsageError, match="which ranks share a host"):
            ranks.find_host_span()
    else:
        assert ranks.find_host_span() == expected


def test_torchrun_numbers_the_ranks_of_a_host_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert find_host_ranks() == range(1)
    for name, value in (("RANK", "6"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert find_host_ranks() == range(4, 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert find_host_ranks() == range(0)
