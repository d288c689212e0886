"""Forms of a policy that act without this package: made, opened, and used in evaluations.

`onnx` is run by a copy of the bundle's `policy.py`, the file that users get, `torch` by `torch.export`, and `aoti` is a
library that AOTInductor compiled from the same graph. `policy.mjs` is the same runtime in JavaScript.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import io
import math
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from pipelines.config.policy_files import RECORD
from pipelines.envs.env import Env
from pipelines.errors import InputMissing, UsageError
from pipelines.export import graph
from pipelines.export.assets import policy as runtime
from pipelines.export.graph import FLOAT32, narrow_weights
from pipelines.export.parity import LIMITS, STRICT, ParityLimits, Step
from pipelines.export.step_function import StepFunction
from pipelines.files.checksums import Mismatch, read_checked
from pipelines.files.json import Form, fits
from pipelines.files.malformed import reason
from pipelines.lake.spaces import Spaces, require_values
from pipelines.learning.bundle import Bundle
from pipelines.rollout.policies import Acting, FunctionPolicy, require_spaces

WEIGHTS, ONNX, TORCH, AOTI = "weights", "onnx", "torch", "aoti"
FILES = {ONNX: "policy.onnx", TORCH: "policy.pt2", AOTI: "policy.aoti.pt2"}
_RUNTIMES = ("policy.py", "policy.mjs")
Graph = Callable[..., tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]]
"""One step of a form: (columns, action, reward, reset, noise, memory) -> outputs by name, memory."""
_TRUSTED = {TORCH: "its format may contain code", AOTI: "it is compiled code"}
_MOST_MEMORY = 1 << 30


class _FormsRecord(Form):
    """What policy.json says for those who run a form."""

    forms: list[str]
    memory: dict[str, list[Any]]
    weights: Literal["float32", "float16", "int8"] = "float32"
    noise: int = Field(ge=0, le=1 << 20)
    max_time: int | None = None
    compiled: dict[str, str] | None = None


def require_forms(record: Mapping[str, Any]) -> None:
    """Raise Mismatch if the record of a bundle with forms cannot be right."""
    if not fits(record, _FormsRecord):
        raise Mismatch(f"{RECORD} has not the fields of one")
    for shape, dtype in record["memory"].values():
        if dtype not in ("float32", "int64") or any(type(size) is not int or size < 1 for size in shape):
            raise Mismatch("its memory is not one of numbers")
        if math.prod(shape) * 8 > _MOST_MEMORY:
            raise Mismatch("its memory is larger than 1 GiB an actor")


def require(form: str, record: Mapping[str, Any], *, trust: bool) -> None:
    """Raise InputMissing if the form cannot be opened: it is not in the bundle, needs a package, or is not trusted."""
    if form not in FILES or form not in record.get("forms", ()):
        known = ", ".join((WEIGHTS, *(each for each in FILES if each in record.get("forms", ()))))
        raise InputMissing(f"there is no form '{form}' in this bundle", hint=f"it has: {known}")
    if form in _TRUSTED and not trust:
        raise InputMissing(f"opening {FILES[form]} needs --trust", hint=f"{_TRUSTED[form]} (as a library: trust=True)")
    if form == AOTI and record.get("compiled") != describe_target():
        targets = record.get("compiled") or {}, describe_target()
        theirs, here = (", ".join(map(str, each.values())) for each in targets)
        raise InputMissing(
            f"{FILES[form]} was compiled for {theirs}; this is {here}",
            hint="act with another form, or export the bundle here: amago export BUNDLE --format aoti --to DIR",
        )
    if form == ONNX:
        require_packages((form,))


def require_packages(forms: tuple[str, ...], *, asked: str = ONNX) -> None:
    """Raise InputMissing if the packages of the extra 'onnx', or the compiler, that make the forms are not installed.

    `asked`: the --format that needs the form onnx.
    """
    if AOTI in forms:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise InputMissing(
                "--format aoti compiles the policy, and there is no C++ compiler here",
                hint="install g++, or name one in the environment variable CXX; or give --format onnx",
            ) from error
    if ONNX not in forms:
        return
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputMissing(
            f"--format {asked} needs the extra 'onnx' ({error.name} is not installed)",
            hint='pip install "amago[onnx]"',
        ) from error


def describe_target() -> dict[str, str]:
    """Describe what a compiled form depends on: torch, the processor, and its vector instructions."""
    return {
        "torch": f"torch {torch.__version__}",
        "machine": f"{platform.system()} {platform.machine()}",
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }


def make_files(function: StepFunction, forms: tuple[str, ...], *, weights: str = FLOAT32) -> dict[str, bytes]:
    """Make the files of the forms, the ONNX model with its weights stored as `weights`."""
    program = graph.trace(function)
    files = {}
    if ONNX in forms:
        content = graph.convert_to_onnx(function, program)
        files[FILES[ONNX]] = content if weights == FLOAT32 else narrow_weights(content, weights)
        assets = importlib.resources.files("pipelines.export.assets")
        files |= {name: assets.joinpath(name).read_bytes() for name in _RUNTIMES}
    if TORCH in forms:
        files[FILES[TORCH]] = graph.save_torch(program)
    if AOTI in forms:
        files[FILES[AOTI]] = graph.compile_graph(program)
    return files


def choose_limits(form: str, record: Mapping[str, Any]) -> ParityLimits:
    """Choose the limits within which a form of a bundle must act as its policy did."""
    return LIMITS[record.get("weights", FLOAT32)] if form == ONNX else STRICT


def describe_step(function: StepFunction) -> dict[str, Any]:
    """Describe the memory and the noise of a step for policy.json, which those who run a form read."""
    memory = function.empty(1)
    rows = {name: [list(rows.shape[1:]), str(rows.dtype).removeprefix("torch.")] for name, rows in memory.items()}
    return {"memory": rows, "noise": function.noise_size, "max_time": function.max_time}


def load_graph(form: str, content: bytes, record: Mapping[str, Any]) -> Graph:
    """Load the graph of a form from its file; it keeps no memory. A file of `torch` or `aoti` must be trusted.

    ValueError or RuntimeError if the file is not such a form.
    """
    if form == AOTI:
        return _wrap_torch(graph.load_compiled(content), record)
    if form == TORCH:
        return _wrap_torch(torch.export.load(io.BytesIO(content)).module(), record)
    with _translate_onnx_errors():
        policy = runtime.OnnxPolicy(given=(dict(record), content))

    def run(
        columns: Mapping[str, np.ndarray], *given: Any
    ) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
        *rest, policy.memory = given
        policy.actors = len(rest[1])
        with _translate_onnx_errors():
            return policy.step(dict(columns), *rest), policy.memory

    return run


def open_form(form: str, content: bytes, record: Mapping[str, Any], actors: int) -> Step:
    """Load the step of a form for `actors` actors, with their memory. Trust and errors are those of `load_graph`."""
    run = load_graph(form, content, record)
    rows = record["memory"].items()
    memory: Mapping[str, np.ndarray] = {name: np.zeros((actors, *shape), dtype) for name, (shape, dtype) in rows}

    def step(*given: Any) -> Mapping[str, np.ndarray]:
        nonlocal memory
        found, memory = run(*given, memory)
        return found

    return step


def _wrap_torch(call: Callable[..., Any], record: Mapping[str, Any]) -> Graph:
    """Wrap `call`, which takes and returns tensors, as a graph of arrays."""

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values))

    own = Spaces.from_json(record["spaces"]).observation

    def run(
        columns: Mapping[str, np.ndarray], *given: Any
    ) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
        *rest, memory = given
        with torch.no_grad():
            greedy, sampled, params, after = call(
                {name: tensor(columns[name]) for name in own},
                *map(tensor, rest),
                {name: tensor(values) for name, values in memory.items()},
            )
        outputs = {"greedy": greedy, "sampled": sampled, "parameters": params}
        return tuple({name: value.numpy() for name, value in each.items()} for each in (outputs, after))  # type: ignore[return-value]

    return run


@contextlib.contextmanager
def _translate_onnx_errors() -> Iterator[None]:
    """Turn the exceptions of onnxruntime, which have no base class of their own, into Mismatch."""
    from onnxruntime.capi import onnxruntime_pybind11_state as runtime_state

    kinds = tuple(
        each for each in vars(runtime_state).values() if isinstance(each, type) and issubclass(each, Exception)
    )
    try:
        yield
    except kinds as error:
        raise Mismatch(f"{FILES[ONNX]} cannot be run: {reason(error)}") from error


class ExportedPolicy:
    """A form as a policy for rollouts and evaluations.

    It draws sampled actions as `AgentPolicy` does, so that the actors from `offset` on of `total` act as they would in
    one process with the others.
    """

    def __init__(
        self, step: Step, record: Mapping[str, Any], *, greedy: bool, seed: int, offset: int = 0, total: int = 0
    ) -> None:
        self._step, self._noise, self._greedy = step, int(record["noise"]), greedy
        self._generator = torch.Generator().manual_seed(seed)
        self._max_time, self._offset, self._total = record["max_time"], offset, total
        self._space = Spaces.from_json(record["spaces"]).action

    @staticmethod
    def require_time(most: int | None, time: int) -> None:
        """Raise UsageError if a form cannot act at step `time` of an episode."""
        if most is not None and time >= most:
            raise UsageError(f"episodes have more than the {most} steps that the policy can distinguish")

    def act(
        self, observation: Mapping[str, np.ndarray], prev_action: np.ndarray, prev_reward: np.ndarray, time: np.ndarray
    ) -> np.ndarray:
        self.require_time(self._max_time, int(np.max(time)))
        here = slice(self._offset, self._offset + len(time))
        noise = torch.rand(self._total or len(time), self._noise, generator=self._generator)[here].numpy()
        reward = np.asarray(prev_reward, np.float32)
        found = self._step(dict(observation), prev_action, reward, np.asarray(time) == 0, noise)
        action = found["greedy" if self._greedy else "sampled"]
        require_values(action, self._space, (len(time),))
        return action


@dataclass(frozen=True, kw_only=True)
class FormFile:
    """A form of a bundle, read; with it the policy acts in another process too."""

    form: str
    content: bytes
    checkpoint: Bundle

    @classmethod
    def read(cls, found: Bundle, form: str, *, trust: bool) -> FormFile:
        """Read a form. InputMissing as `require`, IntegrityError if the bundle is damaged."""
        require(form, found.record, trust=trust)
        with found.understood():
            require_forms(found.record)
            content = read_checked(found.path, FILES[form], found.record)
        return cls(form=form, content=content, checkpoint=found)

    def policy(self, env: Env, *, greedy: bool, seed: int) -> Acting:
        """Make the policy for all actors of `env`. InputMissing if it was trained for other spaces."""
        require_spaces(self.checkpoint, env)
        record, episodes = self.checkpoint.record, env.episodes
        ExportedPolicy.require_time(record["max_time"], (env.spec.horizon or 1) - 1)
        with self.checkpoint.understood():
            step = open_form(self.form, self.content, record, env.num_envs)
        exported = ExportedPolicy(step, record, greedy=greedy, seed=seed, offset=episodes.offset, total=episodes.total)
        policy = FunctionPolicy(self.checkpoint.understood()(exported.act))  # what the file does wrong is damage
        return Acting(policy=policy, policy_id=self.checkpoint.identity, version=self.checkpoint.update)
