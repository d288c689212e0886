import pytest
import typer

from amago_cli.quantities import seconds, size


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90s", 90), ("1.5m", 90), ("12h", 43_200), ("7d", 604_800), ("2w", 1_209_600)],
)
def test_ages(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1000", 1000), ("500MB", 500_000_000), ("2GiB", 2 << 30), ("1.5 kib", 1536), ("3g", 3_000_000_000), ("7B", 7)],
)
def test_sizes(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "x", "7 days", "-1", "1e3", "5y"])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        seconds(text)
    with pytest.raises(typer.BadParameter):
        size(text)
