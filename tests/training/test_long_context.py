"""A window of 10,000 steps: one update at batch 1, and what it takes of memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LIMIT = 24 * 1024**3
UPDATE = """
import json, resource, sys
from pipelines.config.model import AgentSettings
from pipelines.config.settings import TrainSettings
from pipelines.envs.make import make
from pipelines.training.learner import Learner
from tests.learning import factories

sequence, train = json.loads(sys.argv[1]), json.loads(sys.argv[2])
spaces = make("tmaze", num_envs=1, seed=0, params={"corridor": 9_999}).spec.spaces
settings = TrainSettings(batch_size=1, context_length=10_000, threads=1, device="cpu", **train)
learner = Learner(spaces, AgentSettings.model_validate({"sequence": sequence}), settings, seed=0)
data = factories.windows(spaces, lengths=(10_001,), rows=10_001, terminated=0.0)
loss = learner.step(lambda size: data)["loss"].item()
print(json.dumps({"loss": loss, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sequence", "train"),
    [
        ({}, {}),
        ({}, {"activation_checkpointing": True}),
        ({"window": 512, "sink": 1}, {"activation_checkpointing": True}),
        ({"kind": "gru"}, {}),
        ({"kind": "mingru"}, {}),
        ({"kind": "mamba"}, {"activation_checkpointing": True}),
    ],
    ids=str,
)
def test_an_update_on_ten_thousand_steps_fits(sequence: dict[str, object], train: dict[str, object]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UPDATE, json.dumps(sequence), json.dumps(train)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["peak"] < LIMIT
    assert abs(figures["loss"]) < 1e4
