"""Smaller weights: by hand, and in ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.export.graph import FLOAT16, INT8, narrow_weights, quantize
from pipelines.export.parity import LIMITS, Agreement


def test_quantized_weights_are_off_by_half_a_step_at_most() -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((40, 30)).astype(np.float32) * np.geomspace(0.01, 10, 30, dtype=np.float32)
    whole, scale, axis = quantize(weights)
    assert axis == 1  # columns differ in size
    assert whole.dtype == np.int8
    assert np.all(np.abs(weights - whole * scale) <= scale / 2 * (1 + 1e-5))
    assert np.array_equal(np.abs(whole).max(0), np.full(30, 127))
    assert quantize(weights.T)[2] == 0


def test_whole_numbers_and_zeros_are_exact() -> None:
    weights = np.zeros((4, 3), np.float32)
    weights[1] = [127, -5, 1]
    weights[3] = [-127, 127, 3]
    whole, scale, axis = quantize(weights)
    assert np.array_equal(whole * scale.reshape((-1, 1) if axis == 0 else (1, -1)), weights)


@pytest.mark.parametrize(("weights", "share", "error"), [(FLOAT16, 0.6, 1e-3), (INT8, 0.4, 1e-2)])
def test_a_smaller_model_computes_about_the_same(weights: str, share: float, error: float) -> None:
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((64, 48)).astype(np.float32)
    bias = rng.standard_normal(48).astype(np.float32)
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = make.make_graph(
        [make.make_node("MatMul", ["x", "w"], ["y"]), make.make_node("Add", ["y", "b"], ["z"])],
        "g",
        [make.make_tensor_value_info("x", kind, ["n", 64])],
        [make.make_tensor_value_info("z", kind, ["n", 48])],
        [onnx.numpy_helper.from_array(matrix, "w"), onnx.numpy_helper.from_array(bias, "b")],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 20)], ir_version=10).SerializeToString()
    small = narrow_weights(model, weights)
    onnx.checker.check_model(onnx.load_from_string(small))
    assert len(small) < share * len(model)
    x = rng.standard_normal((5, 64)).astype(np.float32)
    [found] = runtime.InferenceSession(small, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    wanted = x @ matrix + bias
    assert np.abs(found - wanted).max() < error * np.abs(wanted).max()
    assert np.abs(found - wanted).max() > 0


def test_limits_widen_with_smaller_weights() -> None:
    found = {
        name: Agreement(
            greatest_difference=0.05, equal_greedy=0.992, equal_sampled=1.0, steps=1, actors=1, resets=0,
            tolerance=limits.parameters, least_equal=limits.equal,
        ).holds
        for name, limits in LIMITS.items()
    }  # fmt: skip
    assert found == {"float32": False, "float16": True, "int8": True}
