"""What a compiler takes as given is asked for once, and the compiler is not imported to say so."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from pipelines.nets.compute import keep_constant


def test_a_compiler_holds_the_answer():
    torch.compiler.reset()
    asked = []

    def look() -> int:
        asked.append(time.sleep(0.0))  # which no compiler follows
        return len(asked)

    def beside(x: torch.Tensor) -> torch.Tensor:
        return x + look()

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(beside, backend="eager", fullgraph=True)(torch.zeros(()))
    asked.clear()
    look = keep_constant(look)
    torch.compiler.reset()
    compiled = torch.compile(beside, backend="eager", fullgraph=True)
    assert [compiled(torch.full((), float(x))).item() for x in range(3)] == [1.0, 2.0, 3.0]
    assert len(asked) == 1


@pytest.mark.system
def test_no_stage_imports_the_compiler():
    stages = "collect", "relabel", "train", "evaluate", "export", "run"
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys, importlib\nfor name in {stages}: importlib.import_module(f'pipelines.stages.{{name}}')\n"
            "print('torch' in sys.modules, 'torch._dynamo' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split() == ["True", "False"]
