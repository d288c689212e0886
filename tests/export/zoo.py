"""Policies of the zoo with what acting through ONNX needs, for tests."""

from __future__ import annotations

from pathlib import Path

from pipelines.config import places
from pipelines.export import forms
from pipelines.export.policy_bundle import specification, write_bundle
from pipelines.export.step_function import StepFunction
from pipelines.learning import bundle
from pipelines.learning.checkpoint import load_agent


def with_onnx(name: str, to: Path) -> Path:
    """Write the bundle `zoo:NAME` with policy.onnx and its runtimes, without a proof."""
    found = bundle.read(places.locate_in_zoo(name))
    function = StepFunction(load_agent(found), capacity=found.record["context_length"])
    about = {**specification(found.record, greedy=found.greedy), **forms.describe(function), "forms": [forms.ONNX]}
    made = forms.make(function, (forms.ONNX,))
    write_bundle(found.acting, found.record, to, greedy=found.greedy, forms=made, about=about)
    return to
