"""Policies of the zoo with what acting through ONNX needs, for tests."""

from __future__ import annotations

from pathlib import Path

from pipelines.config import places
from pipelines.export import forms
from pipelines.export.policy_bundle import describe_policy, write_bundle
from pipelines.export.step_function import StepFunction
from pipelines.learning import bundle
from pipelines.learning.checkpoint import load_agent


def with_onnx(name: str, to: Path) -> Path:
    """Write the bundle `zoo:NAME` with policy.onnx and its runtimes, without a proof."""
    found = bundle.read(places.locate_in_zoo(name))
    function = StepFunction(load_agent(found), capacity=found.record["context_length"])
    about = {
        **describe_policy(found.record, greedy=found.greedy),
        **forms.describe_step(function),
        "forms": [forms.ONNX],
    }
    made = forms.make_files(function, (forms.ONNX,))
    write_bundle(found.acting, found.record, to, greedy=found.greedy, forms=made, about=about)
    return to
