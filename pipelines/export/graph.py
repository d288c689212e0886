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

ACTION, REWARD, RESET, NOISE = "action", "reward", "reset", "noise"
GREEDY, SAMPLED, PARAMETERS = "greedy", "sampled", "parameters"
MEMORY, NEXT = "memory.", "next."  # before the names of memory tensors: what goes in, and what comes out
_OPSET = 20
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
            graph, (), input_names=inputs, output_names=outputs, opset_version=_OPSET, dynamo=True, verbose=False
        )
    assert made is not None  # it is for a conversion that is saved to a file
    model = made.model_proto
    for part in (model, model.graph, *model.graph.node, *model.graph.value_info, *model.functions):
        del part.metadata_props[:]  # where each operator came from: a quarter of a small model
    content: bytes = model.SerializeToString()
    return content


def torch_bytes(graph: ExportedProgram) -> bytes:
    """Return the graph as a file of `torch.export`."""
    file = io.BytesIO()
    torch.export.save(graph, file)
    return file.getvalue()


def compiled_bytes(graph: ExportedProgram) -> bytes:
    """Compile the graph with AOTInductor for this machine's processor. StageFailed if the compiler fails."""
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.exc import CppCompileError

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "policy.pt2")
        try:
            aoti_compile_and_package(graph, package_path=str(path), inductor_configs={"compile_threads": 1})
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
