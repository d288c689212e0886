import pytest
import typer

from amago_cli.quantities import parse_count, parse_positive, parse_seconds, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90s", 90), ("1.5m", 90), ("12h", 43_200), ("7d", 604_800), ("2w", 1_209_600)],
)
def test_ages(text: str, expected: float) -> None:
    assert parse_seconds(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1000", 1000), ("500MB", 500_000_000), ("2GiB", 2 << 30), ("1.5 kib", 1536), ("3g", 3_000_000_000), ("7B", 7)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20000", 20_000),
        ("20_000", 20_000),
        ("1e6", 10**6),
        ("1.5e3", 1500),
        ("100k", 10**5),
        ("2 M", 2 * 10**6),
        ("0", 0),
        ("-3", -3),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_counts(text: str, expected: int) -> None:
    assert parse_count(text) == expected


@pytest.mark.parametrize("text", ["", "x", "1.5", "1e-3", "100 kilo", "100q", "nan", "inf", "1e400", "_", "0x10"])
def test_what_is_not_a_whole_number_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_count(text)


@pytest.mark.parametrize("text", ["0", "-1", "-1k"])
def test_a_limit_is_positive(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_positive(text)


@pytest.mark.parametrize("text", ["", "x", "7 days", "-1", "1e3", "5y"])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_seconds(text)
    with pytest.raises(typer.BadParameter):
        parse_size(text)
