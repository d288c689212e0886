"""A recipe that collects histories, trains on them and evaluates several attempts, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import call

GOALS = ("goal=0,1", "goal=2,0", "goal=2,2")

CHAIN = """
epochs = 2
env = { name = "dark-room", size = 3, attempts = 1, attempt_steps = 5 }
collect = { policy = "learner:q-learning", tasks = TASKS, copies = 2, steps = 120 }
train = { steps = 2, batch_size = 4, context = "history", context_length = 10 }
agent = { sequence = { position = "rope", d_model = 16, num_heads = 2, num_layers = 1, d_ff = 16 } }
evaluate = { episodes = 4, attempts = 3 }
stages = [
    { stage = "collect", stop_epoch = 1 },
    { stage = "train" },
    { stage = "evaluate", start_epoch = -1 },
]
"""


@pytest.mark.system
@pytest.mark.parametrize("tasks", ["3", '"tasks.json"', '["goal=0,1", "goal=2,0"]'])
def test_a_chain_of_histories_is_repeated_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.json").write_text(json.dumps(GOALS))
    Path("ad.toml").write_text(CHAIN.replace("TASKS", tasks))
    for _ in range(2):
        done = call("run", "ad.toml", "--run", "run")
        assert done.code == 0, done.err
    scores = sorted(Path("run/evaluations").glob("*.json"))
    found = json.loads(scores[-1].read_text())
    assert [each["attempt"] for each in found["metrics"]["per_attempt"]] == [1, 2, 3]
    refused = call("run", "ad.toml", "--run", "run", "--set", "collect.tasks=4")
    assert refused.code == 2
    assert "collect.tasks" in refused.err
