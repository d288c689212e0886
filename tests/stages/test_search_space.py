from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.errors import UsageError
from pipelines.stages.search_space import Dimension, read_space


def space(tmp_path: Path, text: str) -> list[Dimension]:
    (tmp_path / "space.toml").write_text(text)
    return read_space(tmp_path / "space.toml")


def test_ranges_and_choices_by_key(tmp_path: Path) -> None:
    text = """
        "agent.gammas" = { choices = [[0.9], [0.9, 0.99]] }
        [train.learning_rate]
        low = 1e-5
        high = 1e-3
        log = true
        [agent.sequence.num_layers]
        low = 1
        high = 4
    """
    gammas, rate, layers = space(tmp_path, text)
    assert (gammas.key, gammas.examples()) == ("agent.gammas", [[0.9], [0.9, 0.99]])
    assert (rate.key, rate.log, rate.whole, rate.examples()) == ("train.learning_rate", True, False, [1e-5, 1e-3])
    assert (layers.key, layers.whole) == ("agent.sequence.num_layers", True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = 5",
        "[x]\nlow = 1",
        "[x]\nlow = 2\nhigh = 1",
        "[x]\nlow = 0\nhigh = 1\nlog = true",
        "[x]\nlow = 0\nhigh = 1\nstep = -1",
        "[x]\nchoices = []",
        "[x]\nchoices = [1]\nlow = 2",
        "[x]\nlow = 1\nhigh = 2\nlogg = true",
        "[x]\nlow = true\nhigh = 2",
        "[x]\nlow = 1\nhigh = inf",
    ],
)
def test_what_cannot_be_searched_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        space(tmp_path, text)
    assert caught.value.problems


def test_every_problem_is_listed(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        space(tmp_path, "[a.b]\nlow = 1\n[c]\nchoices = 5\n")
    assert [text.partition(":")[0] for text in caught.value.problems] == ["a.b", "c"]
