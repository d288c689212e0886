"""The step function as graphs of other runtimes: `torch.export`, ONNX, and libraries that AOTInductor compiles."""

from __future__ import annotations

import io
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from pipelines.errors import StageFailed
from pipelines.export.step_function import StepFunction
from pipelines.lake.spaces import zeros
from pipelines.nets.timestep import last_state_of_torch

ACTION, REWARD, RESET, NOISE = "action", "reward", "reset", "noise"
GREEDY, SAMPLED, PARAMETERS = "greedy", "sampled", "parameters"
MEMORY, NEXT = "memory.", "next."  # before the names of memory tensors: what goes in, and what comes out
_OPSET = 20
_INT32, _INT64, _BOOL = 6, 7, 9  # ONNX's numbers of types
_EXAMPLE_ACTORS = 3  # torch.export takes sizes 0 and 1 for constants


def example(function: StepFunction, actors: int = _EXAMPLE_ACTORS) -> tuple[Any, ...]:
    """Return arguments of `function` for so many new actors."""
    spaces = function.spaces
    observation = {name: torch.from_numpy(zeros(space, (actors,))) for name, space in spaces.observation.items()}
    action = torch.from_numpy(zeros(spaces.action, (actors,)))
    reset = torch.ones(actors, dtype=torch.bool)
    return (
        observation,
        action,
        torch.zeros(actors),
        reset,
        torch.full((actors, function.noise_size), 0.5),
        function.empty(actors),
    )


def program(function: StepFunction) -> ExportedProgram:
    """Return `function` as a graph for any number of actors."""
    arguments = example(function)
    batch = Dim("actors", min=1, max=1 << 16)
    shapes = torch.utils._pytree.tree_map(lambda tensor: {0: batch}, arguments)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.export.export(function, arguments, dynamic_shapes=shapes, strict=False)
    for node in made.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return made


def names(function: StepFunction) -> tuple[list[str], list[str]]:
    """Return the names of a graph's inputs and outputs, in order."""
    memory = list(function.empty(1))
    inputs = [*function.spaces.observation, ACTION, REWARD, RESET, NOISE, *(f"{MEMORY}{name}" for name in memory)]
    return inputs, [GREEDY, SAMPLED, PARAMETERS, *(f"{NEXT}{name}" for name in memory)]


def onnx_bytes(function: StepFunction, graph: ExportedProgram) -> bytes:
    """Return the graph as an ONNX model."""
    inputs, outputs = names(function)
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
            custom_translation_table={torch.ops.amago.last_state.default: _onnx_gru},
        )
    assert made is not None  # it is for a conversion that is saved to a file
    model = made.model_proto
    for part in (model, model.graph, *model.graph.node, *model.graph.value_info, *model.functions):
        del part.metadata_props[:]  # where each operator came from: a quarter of a small model
    content: bytes = model.SerializeToString()
    return content


def _onnx_gru(x_NSE: Any, lengths_N: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any, bias_hh: Any) -> Any:
    """Translate `last_state`. ONNX has the gates in another order, and no sequences without a place."""
    from onnxscript import opset20

    op: Any = opset20  # its types are of values, not of a graph's

    def ordered(weight: Any) -> Any:
        """Return a weight (1, 3 H, ...) with the gates of update, reset and candidate."""
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


def _of_torch(graph: ExportedProgram) -> ExportedProgram:
    """Return the graph without operators of this package."""
    own = torch.ops.amago.last_state.default
    if all(node.target != own for node in graph.graph.nodes):
        return graph
    with torch.no_grad():
        made = graph.run_decompositions({own: last_state_of_torch})
    for node in made.graph.nodes:
        node.meta.pop("from_node", None)  # the operators that it replaces
    return made


def torch_bytes(graph: ExportedProgram) -> bytes:
    """Return the graph as a file of `torch.export`."""
    file = io.BytesIO()
    torch.export.save(_of_torch(graph), file)
    return file.getvalue()


def compiled_bytes(graph: ExportedProgram) -> bytes:
    """Compile the graph with AOTInductor for this machine's processor. StageFailed if the compiler fails."""
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.exc import CppCompileError

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "policy.pt2")
        try:
            aoti_compile_and_package(_of_torch(graph), package_path=str(path), inductor_configs={"compile_threads": 1})
        except CppCompileError as error:
            last = str(error).strip().splitlines()[-1]
            raise StageFailed(f"the C++ compiler failed: {last}", hint="give --format onnx or torch") from error
        return path.read_bytes()


def compiled(content: bytes) -> Callable[..., Any]:
    """Load a compiled graph, which is code of this process from then on. RuntimeError if it is not one."""
    from torch._inductor import aoti_load_package

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "policy.pt2")
        path.write_bytes(content)
        return aoti_load_package(str(path))
