from __future__ import annotations

from pipelines.report.charts import LIGHT, Lines, Series


def test_two_evaluations_are_points_and_not_a_line() -> None:
    """A line from the evaluation before training to the one after it would look like a learning curve."""
    lines = [
        Series(name="test tasks", values=[0.0, 0.9], low=[0.0, 0.8], high=[0.1, 1.0], x=[0, 4000], joined=False),
        Series(name="train tasks", values=[0.1, 0.5, 0.9], low=[0.0, 0.4, 0.8], high=[0.2, 0.6, 1.0], x=[1, 2, 3]),
    ]
    chart = Lines(series=lines, x_title="updates", y_title="success")
    assert [row["joined"] for row in chart.rows()] == [False, False, True, True, True]
    for spec in (chart.spec(LIGHT), chart.interactive_spec()):
        marks = {layer["mark"]["type"]: layer.get("transform") for layer in spec["layer"]}
        assert marks["line"] == [{"filter": "!datum.reference && datum.joined"}]
        assert marks["area"] == [{"filter": "isValid(datum.low) && datum.joined"}]
        assert marks["rule"] == [{"filter": "isValid(datum.low) && !datum.joined"}]
