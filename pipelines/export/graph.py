"""The step function as graphs of other runtimes: `torch.export`, ONNX, and libraries that AOTInductor compiles.

ONNX models may store weights as float16 or int8, which a runtime widens to float32: storage changes, not arithmetic.
float16 rounds each weight. int8 has a scale per row or column of a matrix, whichever loses less (symmetric per-channel
quantization, as in Jacob et al. 2018, arXiv 1712.05877, section 3).
"""

from __future__ import annotations

import io
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import Dim, ExportedProgram

from pipelines.errors import StageFailed
from pipelines.export.step_function import StepFunction
from pipelines.lake.spaces import zeros
from pipelines.nets.compute import export_operators
from pipelines.nets.timestep import last_state_of_torch

ACTION, REWARD, RESET, NOISE = "action", "reward", "reset", "noise"
GREEDY, SAMPLED, PARAMETERS = "greedy", "sampled", "parameters"
MEMORY, NEXT = "memory.", "next."  # before the names of memory tensors: what goes in, and what comes out
FLOAT32, FLOAT16, INT8 = "float32", "float16", "int8"
_OPSET = 20
_INT32, _INT64, _BOOL = 6, 7, 9  # ONNX's numbers of types
_LEAST_ELEMENTS = 64  # of a tensor that is worth another node
_LARGEST_HALF = 65_504.0
_EXAMPLE_ACTORS = 3  # torch.export takes sizes 0 and 1 for constants


def trace(function: StepFunction) -> ExportedProgram:
    """Trace `function` as a graph for any number of actors."""
    spaces, actors = function.spaces, _EXAMPLE_ACTORS
    arguments = (
        {name: torch.from_numpy(zeros(space, (actors,))) for name, space in spaces.observation.items()},
        torch.from_numpy(zeros(spaces.action, (actors,))),
        torch.zeros(actors),
        torch.ones(actors, dtype=torch.bool),
        torch.full((actors, function.noise_size), 0.5),
        function.empty(actors),
    )
    batch = Dim("actors", min=1, max=1 << 16)
    shapes = torch.utils._pytree.tree_map(lambda tensor: {0: batch}, arguments)
    with torch.no_grad(), export_operators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.export.export(function, arguments, dynamic_shapes=shapes, strict=False)
    for node in made.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return made


def convert_to_onnx(function: StepFunction, graph: ExportedProgram) -> bytes:
    """Convert the graph to an ONNX model."""
    memory = list(function.empty(1))
    inputs = [*function.spaces.observation, ACTION, REWARD, RESET, NOISE, *(f"{MEMORY}{name}" for name in memory)]
    outputs = [GREEDY, SAMPLED, PARAMETERS, *(f"{NEXT}{name}" for name in memory)]
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of packages that nothing here needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.onnx.export(
            graph,
            (),
            input_names=inputs,
            output_names=outputs,
            opset_version=_OPSET,
            dynamo=True,
            verbose=False,
            custom_translation_table={torch.ops.amago.last_state.default: _translate_last_state},
        )
    assert made is not None  # it is for a conversion that is saved to a file
    model = made.model_proto
    for part in (model, model.graph, *model.graph.node, *model.graph.value_info, *model.functions):
        del part.metadata_props[:]  # where each operator came from: a quarter of a small model
    content: bytes = model.SerializeToString()
    return content


def _translate_last_state(
    x_NSE: Any, lengths_N: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any, bias_hh: Any
) -> Any:
    """Translate `last_state`. ONNX has the gates in another order, and no sequences without a place."""
    from onnxscript import opset20

    op: Any = opset20  # its types are of values, not of a graph's

    def ordered(weight: Any) -> Any:
        """Order the gates of a weight (1, 3 H, ...): update, reset, candidate."""
        reset, update, candidate = op.Split(weight, axis=0, num_outputs=3)
        return op.Concat(update, reset, candidate, axis=0)

    bias = op.Concat(ordered(bias_ih), ordered(bias_hh), axis=0)
    _, last_1NH = op.GRU(
        op.Transpose(x_NSE, perm=[1, 0, 2]),
        *(op.Unsqueeze(each, [0]) for each in (ordered(weight_ih), ordered(weight_hh), bias)),
        op.Cast(op.Max(op.Cast(lengths_N, to=_INT64), op.Constant(value_ints=[1])), to=_INT32),
        hidden_size=weight_hh.shape[1],
        linear_before_reset=1,
    )
    return op.Where(
        op.Unsqueeze(op.Cast(lengths_N, to=_BOOL), [1]), op.Squeeze(last_1NH, [0]), op.Constant(value_float=0.0)
    )


def narrow_weights(content: bytes, weights: str) -> bytes:
    """Store the matrices of an ONNX model as `weights`, float16 or int8. Small tensors stay as they are."""
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
            whole, scale, axis = quantize(values)
            kept += [
                numpy_helper.from_array(whole, f"{tensor.name}.narrow"),
                numpy_helper.from_array(scale, f"{tensor.name}.scale"),
            ]
            inputs = [each.name for each in kept[-2:]]
            nodes.append(onnx.helper.make_node("DequantizeLinear", inputs, [tensor.name], axis=axis))
        else:
            kept.append(tensor)
    for field, items in ((model.graph.initializer, kept), (model.graph.node, [*nodes, *model.graph.node])):
        copies = [type(item).FromString(item.SerializeToString()) for item in items]  # deleting frees the originals
        del field[:]
        field.extend(copies)
    found: bytes = model.SerializeToString()
    return found


def quantize(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Round weights to int8, from -127 to 127; return them, float32 scales by index of an axis, and that axis.

    The axis is the first or the last, whichever has the smaller squared error.
    """
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


def _decompose(graph: ExportedProgram) -> ExportedProgram:
    """Replace the operators of this package by torch's own, so that the graph runs without this package."""
    own = torch.ops.amago.last_state.default
    if all(node.target != own for node in graph.graph.nodes):
        return graph
    with torch.no_grad():
        made = graph.run_decompositions({own: last_state_of_torch})
    for node in made.graph.nodes:
        node.meta.pop("from_node", None)  # the operators that it replaces
    return made


def save_torch(graph: ExportedProgram) -> bytes:
    """Save the graph as a file of `torch.export`."""
    file = io.BytesIO()
    torch.export.save(_decompose(graph), file)
    return file.getvalue()


def compile_graph(graph: ExportedProgram) -> bytes:
    """Compile the graph with AOTInductor for this machine's processor. StageFailed if the compiler fails."""
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.exc import CppCompileError

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "policy.pt2")
        try:
            aoti_compile_and_package(_decompose(graph), package_path=str(path), inductor_configs={"compile_threads": 1})
        except CppCompileError as error:
            last = str(error).strip().splitlines()[-1]
            raise StageFailed(f"the C++ compiler failed: {last}", hint="give --format onnx or torch") from error
        return path.read_bytes()


def load_compiled(content: bytes) -> Callable[..., Any]:
    """Load a compiled graph, which is code of this process from then on. RuntimeError if it is not one."""
    from torch._inductor import aoti_load_package

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "policy.pt2")
        path.write_bytes(content)
        return aoti_load_package(str(path))
