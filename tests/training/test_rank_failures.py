"""Every early end of two ranks: all end with the exit code of one process, its reason is reported once, and no rank
waits for another until `train.rank_timeout`."""

from __future__ import annotations

import json
import shutil
import signal
import textwrap
from pathlib import Path

import pytest

from amago_cli.ranks import _exit_code
from pipelines.errors import StageFailed
from pipelines.lake.store import Lake
from tests.ranks import gone, small_lake, train

PLUGIN = """
    import os
    import torch
    from pipelines.errors import UsageError

    def everywhere(states, batch, mask):
        return states[:, 1:].square().mean(-1) * float("nan")

    def rank_0(states, batch, mask):
        return _failing("0", states)

    def rank_1(states, batch, mask):
        return _failing("1", states)

    def _failing(rank, states):
        if os.environ["RANK"] == rank:
            raise RuntimeError("the plug-in fails")
        return states[:, 1:].square().mean(-1)

    class Refusing(torch.nn.Module):
        def __init__(self, *arguments, **options):
            raise UsageError("not on this rank") if os.environ["RANK"] == "1" else ValueError
"""


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({0: 2, 1: -signal.SIGTERM}, 2),
        ({0: 1, 1: -signal.SIGABRT}, 1),
        ({0: -signal.SIGTERM, 1: 3}, 3),
        ({0: 143, 1: -signal.SIGTERM}, 143),
        ({0: 143, 1: -signal.SIGKILL}, 137),  # rank 0 was stopped by the launcher, since rank 1 had ended
        ({1: -signal.SIGKILL}, 137),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(codes: dict[int, int], expected: int) -> None:
    assert _exit_code(codes) == expected


def test_a_rank_0_that_was_killed_has_reported_nothing() -> None:
    with pytest.raises(StageFailed, match="rank 0 was killed by SIGKILL") as raised:
        _exit_code({0: -signal.SIGKILL, 1: -signal.SIGTERM})
    assert raised.value.exit_code == 137


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    (folder / "plugin.py").write_text(textwrap.dedent(PLUGIN))
    return small_lake(folder / "lake")


def plugin(name: str) -> dict[str, object]:
    return {"agent__auxiliary_losses": f"[{{ kind = 'plugin:{name}' }}]"}


CASES: dict[str, tuple[int, str, dict[str, object]]] = {
    "predicate": (2, "SQL: ", {"train__where": "length >"}),
    "nothing-matches": (3, "no trajectories to draw from", {"train__where": "length > 1000"}),
    "positions": (2, "beyond the 5 rows", {"agent__sequence__position": "learned", "agent__sequence__max_time": 5}),
    "device": (3, "is not here", {"train__device": "cuda:7"}),
    "gradient": (1, "the gradient was not finite", {"train__max_skipped": 2, **plugin("everywhere")}),
    "rank-0": (1, "the plug-in fails", plugin("rank_0")),
    "rank-1": (1, "the plug-in fails", plugin("rank_1")),
}


@pytest.mark.system
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "gradient" else pytest.mark.slow) for case in CASES]
)
def test_an_early_end_is_that_of_one_process(tmp_path: Path, lake: Path, case: str) -> None:
    code, message, settings = CASES[case]
    run = tmp_path / "run"
    done = train(lake, run, "--steps", "8", "--ranks", "2", train__rank_timeout=600, **settings)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    if case == "rank-1":  # rank 0 says why it ends, and what to do
        assert "another rank has ended; repeat the command" in lines.pop()
    assert len(lines) == 1
    assert "has ended" not in lines[0]
    assert gone(run)


@pytest.mark.system
@pytest.mark.slow
def test_runs_and_lakes_that_do_not_fit_are_refused_once(tmp_path: Path, lake: Path) -> None:
    run, common = tmp_path / "run", {"train__rank_timeout": 600}
    assert train(lake, run, "--steps", "3", "--ranks", "2", **common).returncode == 0
    Lake.create(tmp_path / "empty")
    shutil.copytree(lake, tmp_path / "copy")
    (tmp_path / "copy/lake.json").write_text(json.dumps(json.loads((lake / "lake.json").read_text()) | {"id": "0" * 8}))
    for place, settings, code, message in (
        (tmp_path / "empty", {}, 3, "empty"),
        (tmp_path / "copy", {}, 2, "was trained on other lakes"),
        (lake, {"train__learning_rate": 1.0}, 2, "train.learning_rate: 0.0001 -> 1.0"),
    ):
        done = train(place, run, "--steps", "5", "--ranks", "2", **common, **settings)
        assert done.returncode == code, done.stderr
        assert message in done.stderr
        assert done.stderr.count("error: ") == 1
        assert done.stdout.count("\n") == 1
    weights = next((run / "checkpoints").glob("0*/*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    done = train(lake, run, "--steps", "5", "--ranks", "2", **common)
    assert done.returncode == 4, done.stderr
    assert done.stderr.count("error: ") == 1
    (tmp_path / "file").touch()
    done = train(lake, tmp_path / "file/run", "--steps", "5", "--ranks", "2", **common)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("error: ") == 1


@pytest.mark.system
@pytest.mark.slow
def test_what_another_rank_refuses_names_it(tmp_path: Path, lake: Path) -> None:
    """Rank 0 raises something else at the same moment, which is its own."""
    done = train(lake, tmp_path / "run", "--steps", "5", "--ranks", "2", train__rank_timeout=600, **plugin("Refusing"))
    assert done.returncode in (1, 2)
    assert "not on this rank" in done.stderr or "ValueError" in done.stderr
    assert gone(tmp_path / "run")
