"""ONNX models with smaller weights, stored as float16 or int8, which a runtime widens to float32.

Only storage changes, not arithmetic. float16 rounds each weight; int8 has a scale per row or column of a matrix,
whichever loses less (symmetric per-channel quantization, as in Jacob et al. 2018, arXiv 1712.05877, section 3).
"""

from __future__ import annotations

from typing import Any

import numpy as np

FLOAT32, FLOAT16, INT8 = "float32", "float16", "int8"
_LEAST_ELEMENTS = 64  # of a tensor that is worth a node
_LARGEST_HALF = 65_504.0


def narrowed(content: bytes, weights: str) -> bytes:
    """Return an ONNX model whose matrices of weights are stored as `weights`, float16 or int8."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load_from_string(content)
    kept, nodes = [], []
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype != np.float32 or values.ndim < 2 or values.size < _LEAST_ELEMENTS:
            kept.append(tensor)
        elif weights == FLOAT16 and np.abs(values).max() <= _LARGEST_HALF:
            kept.append(numpy_helper.from_array(values.astype(np.float16), f"{tensor.name}.narrow"))
            nodes.append(onnx.helper.make_node("Cast", [kept[-1].name], [tensor.name], to=onnx.TensorProto.FLOAT))
        elif weights == INT8:
            whole, scale, axis = quantized(values)
            kept += [
                numpy_helper.from_array(whole, f"{tensor.name}.narrow"),
                numpy_helper.from_array(scale, f"{tensor.name}.scale"),
            ]
            inputs = [each.name for each in kept[-2:]]
            nodes.append(onnx.helper.make_node("DequantizeLinear", inputs, [tensor.name], axis=axis))
        else:
            kept.append(tensor)
    _replace(model.graph.initializer, kept)
    _replace(model.graph.node, [*nodes, *model.graph.node])
    found: bytes = model.SerializeToString()
    return found


def quantized(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return weights as int8 from -127 to 127, their scales (float32, one per index of `axis`), and that axis: first or
    last, with the smaller squared error."""
    best = None
    for axis in (0, values.ndim - 1):
        others = tuple(each for each in range(values.ndim) if each != axis)
        scale = np.maximum(np.abs(values).max(others, keepdims=True) / 127.0, np.finfo(np.float32).tiny)
        whole = np.clip(np.rint(values / scale), -127, 127)
        error = float(np.square(values - whole * scale, dtype=np.float64).sum())
        if best is None or error < best[0]:
            best = error, whole.astype(np.int8), scale.astype(np.float32).ravel(), axis
    assert best is not None
    return best[1:]


def _replace(field: Any, items: list[Any]) -> None:
    copies = [type(item).FromString(item.SerializeToString()) for item in items]
    del field[:]
    field.extend(copies)
