from __future__ import annotations

from pathlib import Path

from pipelines.report.training import Meaning


def test_patterns_match_any_ending_and_exact_names_come_first() -> None:
    assert Meaning.find("auxiliary_loss_3") == Meaning.find("auxiliary_loss_0") != ""
    assert Meaning.find("grad_norm") != Meaning.find("grad_norm_actor") != ""
    assert Meaning.find("mine") == ""


def test_metrics_are_shown_in_the_listed_order_and_others_last() -> None:
    assert Meaning.sort(["zeta", "entropy", "alpha", "loss", "q"]) == ["loss", "q", "entropy", "alpha", "zeta"]


def test_the_documentation_lists_the_same_metrics() -> None:
    page = (Path(__file__).parents[2] / "docs/learning.md").read_text()
    for entry in Meaning.read_all():
        assert f"| {', '.join(f'`{name}`' for name in entry.names)} | {entry.meaning} |" in page
