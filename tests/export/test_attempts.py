"""The loop in docs/exporting.md that builds the observation of attempts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from pipelines.envs.task_env import Attempts
from pipelines.export.policy_bundle import DeployedPolicy
from tests.cli.conftest import Amago, amago, tiny

__all__ = ["amago"]  # the fixture
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.system
def test_the_loop_of_the_documentation_shows_what_training_showed(
    amago: Amago, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "exporting.md").read_text()
    [code] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "with_attempt" in block]
    options = ("--env", "gym:CartPole-v1", "--set", "env.attempts=3")
    assert amago("collect", *options, "--run", "run", "--steps", 400, "--actors", 4, "-q").code == 0
    trained = amago("train", "--from-lake", "run", "--run", "run", "--steps", 2, *tiny(), "-q")
    assert trained.code == 0, trained.err
    assert amago("export", "run", "--to", "policy", "-q").code == 0

    seen: list[tuple[Any, float, Any]] = []
    act = DeployedPolicy.act

    def watch(policy: DeployedPolicy, observation: Any, reward: float = 0.0) -> Any:
        action = act(policy, observation, reward)
        seen.append((observation, reward, action))
        return action

    monkeypatch.setattr(DeployedPolicy, "act", watch)
    exec(code, {})
    scores = [float(text) for text in re.findall(r"^attempt \d: (.*)$", capsys.readouterr().out, re.MULTILINE)]

    env = Attempts(gymnasium.make("CartPole-v1"), 3, show=True)
    observation, _ = env.reset(seed=7)
    reward, done, paid = 0.0, False, 0.0
    for shown, given, action in seen:
        assert not done
        for name in ("observation", "attempt"):
            np.testing.assert_array_equal(shown[name], observation[name])
        assert given == reward
        observation, reward, terminated, truncated, _ = env.step(action)
        done, paid = terminated or truncated, paid + reward
    assert done
    assert (len(scores), sum(scores)) == (3, paid)
