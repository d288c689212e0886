from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipelines.errors import StageFailed
from pipelines.report.charts import Lines, Series

CURVES = (
    Series(name="random", values=[0.1] * 5, reference=True),
    Series(name="optimal", values=[0.9], reference=True),
    Series(name="before training", values=[0.1] * 5, low=[0.05] * 5, high=[0.15] * 5),
    Series(name="after training", values=[0.4, 0.6, 0.7, 0.75, 0.8], low=[0.3] * 5, high=[0.9] * 5),
)


def draw_adaptation(path: Path, series: Sequence[Series], *, title: str = "") -> Path:
    chart = Lines(series=series, x_title="attempt in the episode", y_title="success", share=True, whole=True)
    return chart.draw(path, title=title)


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.mark.system
def test_an_adaptation_curve_is_a_png_of_a_readable_size(tmp_path: Path) -> None:
    path = draw_adaptation(tmp_path / "deep" / "a.png", CURVES, title="A long title, wider than it is useful " * 3)
    width, height = size(path)
    assert width > 1000
    assert height > 500


def test_one_attempt_is_a_picture_too(tmp_path: Path) -> None:
    assert size(draw_adaptation(tmp_path / "a.png", [Series(name="one", values=[0.5])]))


def test_learning_curves_of_metrics_other_than_shares(tmp_path: Path) -> None:
    whole = Series(name="seed 0", values=[10.0, 200.0, 480.0], x=[0, 500, 1000])
    series = [whole, Series(name="cut short", values=[10.0, 20.0], x=[0, 500])]
    chart = Lines(series=series, x_title="gradient updates", y_title="return", share=False)
    assert size(chart.draw(tmp_path / "l.png", title="CartPole"))


def test_the_picture_changes_with_the_data(tmp_path: Path) -> None:
    first = draw_adaptation(tmp_path / "a.png", CURVES).read_bytes()
    again = draw_adaptation(tmp_path / "b.png", CURVES).read_bytes()
    other = draw_adaptation(tmp_path / "c.png", CURVES[:3]).read_bytes()
    assert first == again
    assert first != other


def test_every_series_is_in_the_picture_with_its_band(tmp_path: Path) -> None:
    svg = draw_adaptation(tmp_path / "a.svg", CURVES, title="<b>Frozen & lake</b>").read_text()
    root = ElementTree.fromstring(svg)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<b>Frozen & lake</b>" in texts
    assert {series.name for series in CURVES} <= set(texts)
    assert svg.count('stroke-dasharray="7,4"') == 2  # optimal: its line, and its symbol in the legend
    bands = [path for path in root.iter("{http://www.w3.org/2000/svg}path") if path.get("opacity") == "0.16"]
    assert len(bands) == 2


def test_a_picture_needs_neither_a_display_nor_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("PATH", "")
    assert size(draw_adaptation(tmp_path / "a.png", CURVES))


def test_a_band_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="need 2 values"):
        Series(name="x", values=[1, 2], low=[1], high=[2])
    with pytest.raises(ValueError, match="need 2 values"):
        Series(name="x", values=[1, 2], low=[1, 2])


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StageFailed, match="file"):
        draw_adaptation(tmp_path / "file" / "a.png", CURVES)
