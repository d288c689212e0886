"""The model card, read by the Hub's own library and as YAML."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest

from pipelines.report import model_card
from pipelines.report.model_card import CardSource

METRICS = {
    "episodes": 500,
    "return_mean": 3.832,
    "return_std": 0.969,
    "return_ci95": [3.744, 3.914],
    "success_mean": 0.978,
    "success_ci95": [0.964, 0.99],
    "per_attempt": [
        {"attempt": 1, "success_mean": 0.208, "success_ci95": [0.172, 0.246]},
        {"attempt": 2, "success_mean": 0.978, "success_ci95": [0.964, 0.99]},
    ],
}
HOSTILE = "x\n---\nlicense: evil\n# `](javascript:1) <script>alert(1)</script> $(rm) ```"


def source(**changed: Any) -> CardSource:
    given: dict[str, Any] = {
        "name": "maze",
        "env": {"name": "meta-frozen-lake", "size": 4},
        "update": 3700,
        "version": "0.1.0",
        "files": ["policy.onnx"],
        "evaluation": model_card.make_evaluation(METRICS, update=3700, split="test", greedy=False),
        "licence": "mit",
    }
    return CardSource(**{**given, **changed})


def test_the_hub_reads_environment_score_and_licence() -> None:
    hub = pytest.importorskip("huggingface_hub")
    data = hub.ModelCard(source().write().decode()).data
    assert (data.license, data.library_name, data.pipeline_tag) == ("mit", "amago", "reinforcement-learning")
    assert {"in-context-reinforcement-learning", "meta-frozen-lake"} <= set(data.tags)
    [result] = data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == (
        "meta-frozen-lake",
        "mean_reward",
        "3.832 +/- 0.969",
    )


def test_scores_have_their_intervals() -> None:
    text = source().write().decode()
    assert "500 episodes of test tasks" in text
    assert "| return | 3.832 | 3.744 to 3.914 |" in text
    assert "| success in attempt 1 | 0.208 | 0.172 to 0.246 |" in text
    assert "from policy import OnnxPolicy" in text
    assert "OnnxPolicy" not in source(files=[]).write().decode()


@pytest.mark.parametrize(
    "metrics", [{}, {"return_mean": "3"}, {"return_mean": 1.0, "per_attempt": [3, {"attempt": "x"}]}]
)
def test_a_card_without_a_return_says_that_the_policy_was_not_evaluated(metrics: dict[str, Any]) -> None:
    evaluation = model_card.make_evaluation(metrics, update=1, split="test", greedy=False)
    text = source(evaluation=evaluation).write().decode()
    assert ("not evaluated" in text) == (not isinstance(metrics.get("return_mean"), float))
    assert "not evaluated" in source(evaluation=None).write().decode()


def test_hostile_names_stay_text() -> None:
    yaml = pytest.importorskip("yaml")
    hostile = source(
        name=HOSTILE, version=HOSTILE, licence=HOSTILE, lakes=[HOSTILE], command=["amago", "run", HOSTILE],
        env={"name": HOSTILE, HOSTILE: HOSTILE},
    )  # fmt: skip
    text = hostile.write().decode()
    _, front, body = re.split(r"^---$", text, maxsplit=2, flags=re.MULTILINE)
    data = yaml.safe_load(front)
    assert (data["license"], data["model-index"][0]["name"]) == (HOSTILE, HOSTILE)
    fences = body.count("```")
    assert fences == 6  # three blocks, each opened and closed
    outside = "".join(body.split("```")[::2])
    interpreted = re.sub(r"(?<!\\)`[^`]*`", "", outside)  # all but spans of code
    assert "<script" not in interpreted
    assert "](javascript" not in interpreted
    assert html.unescape(outside).count("alert") >= 3  # shown, not dropped


def test_a_damaged_record_names_no_lakes() -> None:
    for record in ({}, {"data": 3}, {"data": {"lakes": {}}}, {"data": {"lakes": [3, {"name": 1}]}}):
        assert model_card.list_lakes(record) == []
    record = {"data": {"lakes": [{"name": "/disk/runs/a/lake", "id": "0123456789abcdef"}]}}
    assert model_card.list_lakes(record) == ["a/lake (0123456789ab)"]
