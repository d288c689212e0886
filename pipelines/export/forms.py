"""Forms of a policy that act without this package: made, opened, and used in evaluations.

`onnx` is run by the bundle's own `policy.py`, the file that users get, and `torch` by `torch.export`.
"""

from __future__ import annotations

import importlib.resources
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pipelines.errors import InputMissing
from pipelines.export import graph
from pipelines.export.assets import policy as runtime
from pipelines.export.parity import Arrays, Step
from pipelines.export.step_function import StepFunction
from pipelines.lake.spaces import Spaces

ONNX, TORCH = "onnx", "torch"
FILES = {ONNX: "policy.onnx", TORCH: "policy.pt2"}
RUNTIME = "policy.py"


def require_packages(forms: tuple[str, ...]) -> None:
    """Raise InputMissing, naming the extra, if packages that make the forms are not installed."""
    if ONNX not in forms:
        return
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputMissing(
            f"--format onnx needs the extra 'onnx' ({error.name} is not installed)", hint='pip install "amago[onnx]"'
        ) from error


def make(function: StepFunction, forms: tuple[str, ...]) -> dict[str, bytes]:
    """Return the files of the forms."""
    program = graph.program(function)
    files = {}
    if ONNX in forms:
        files[FILES[ONNX]] = graph.onnx_bytes(function, program)
        files[RUNTIME] = importlib.resources.files("pipelines.export.assets").joinpath(RUNTIME).read_bytes()
    if TORCH in forms:
        files[FILES[TORCH]] = graph.torch_bytes(program)
    return files


def described(function: StepFunction) -> dict[str, Any]:
    """Return what policy.json says for those who run a form."""
    memory = function.empty(1)
    rows = {name: [list(rows.shape[1:]), str(rows.dtype).removeprefix("torch.")] for name, rows in memory.items()}
    return {"memory": rows, "noise": function.noise_size, "max_time": function.max_time}


def opened(form: str, content: bytes, record: Mapping[str, Any], actors: int) -> Step:
    """Return the step of a form for `actors` actors, from its file. A file of `torch` must be trusted."""
    if form == ONNX:
        return _outputs(runtime.OnnxPolicy(given=(dict(record), content), actors=actors))
    module = torch.export.load(io.BytesIO(content)).module()
    rows = record["memory"].items()
    memory = {name: torch.zeros(actors, *shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in rows}

    def step(
        columns: Arrays, action: np.ndarray, reward: np.ndarray, reset: np.ndarray, noise: np.ndarray
    ) -> Mapping[str, np.ndarray]:
        nonlocal memory
        own = Spaces.from_json(record["spaces"]).observation
        given = {name: torch.from_numpy(np.ascontiguousarray(columns[name])) for name in own}
        rest = (torch.from_numpy(np.ascontiguousarray(value)) for value in (action, reward, reset, noise))
        with torch.no_grad():
            greedy, sampled, params, memory = module(given, *rest, memory)
        return {"greedy": greedy.numpy(), "sampled": sampled.numpy(), "parameters": params.numpy()}

    return step


def _outputs(policy: runtime.OnnxPolicy) -> Step:
    def step(
        columns: Arrays, action: np.ndarray, reward: np.ndarray, reset: np.ndarray, noise: np.ndarray
    ) -> Mapping[str, np.ndarray]:
        found: Mapping[str, np.ndarray] = policy.step(columns, action, reward, reset, noise)
        return found

    return step


class ExportedPolicy:
    """A form as a policy for rollouts and evaluations, which draws sampled actions as `AgentPolicy` does."""

    def __init__(self, step: Step, record: Mapping[str, Any], *, greedy: bool, seed: int) -> None:
        self._step, self._noise, self._greedy = step, int(record["noise"]), greedy
        self._generator = torch.Generator().manual_seed(seed)

    def act(
        self, observation: Mapping[str, np.ndarray], prev_action: np.ndarray, prev_reward: np.ndarray, time: np.ndarray
    ) -> np.ndarray:
        noise = torch.rand(len(time), self._noise, generator=self._generator).numpy()
        reward = np.asarray(prev_reward, np.float32)
        found = self._step(dict(observation), prev_action, reward, np.asarray(time) == 0, noise)
        return found["greedy" if self._greedy else "sampled"]
