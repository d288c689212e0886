"""Each way of training, by two ranks: the windows, losses and gradients of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import assert_alike, lines, small_lake, train


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_lake(tmp_path_factory.mktemp("ranks") / "lake")


KINDS: dict[str, dict[str, object]] = {
    "actor-critic": {},
    "multi-task": {"agent__kind": "multi-task"},
    "behaviour-cloning": {"agent__kind": "behaviour-cloning"},
    "priorities": {"train__per_alpha": 0.6},
    "packed-bf16": {"train__packing": True, "train__precision": "bf16"},
    "auxiliary": {"agent__auxiliary_losses": "[{ kind = 'next-step' }]"},
    "mixture-of-weights": {"train__weighting": "task", "train__half_life": 500.0},
}


@pytest.mark.system
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "actor-critic" else pytest.mark.slow) for kind in KINDS],
)
def test_two_ranks_do_what_one_does(tmp_path: Path, lake: Path, kind: str) -> None:
    settings = KINDS[kind]
    for run, options in (("one", ()), ("two", ("--ranks", "2"))):
        done = train(lake, tmp_path / run, "--steps", "6", *options, **settings)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["metrics"].get("ranks", 1) == (2 if options else 1)
    if kind == "packed-bf16":
        one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
        assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=0.02)
    else:
        assert_alike(tmp_path / "one", tmp_path / "two")
