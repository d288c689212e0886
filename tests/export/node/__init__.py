"""`policy.mjs` in a process of Node, for tests."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import npm


class NodePolicy:
    """The policy of a bundle, run by its `policy.mjs`. Values are those of JSON."""

    def __init__(self, bundle: Path, **options: Any) -> None:
        node, onnxruntime = shutil.which("node"), npm.folder("onnxruntime-node")
        if node is None or onnxruntime is None:
            pytest.skip("no Node or no onnxruntime-node here: python -m tests.npm")
        script = Path(__file__).with_name("act.mjs")
        command = [node, str(script), str(onnxruntime), str(bundle), json.dumps(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def __enter__(self) -> NodePolicy:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def __call__(self, name: str, *given: Any) -> Any:
        """Call a method; RuntimeError with the message of an error there, after which the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *given], default=_plain) + "\n")
        self._process.stdin.flush()
        return self._answer()["value"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process has ended"}
        if "error" in answer:
            self._process.communicate()
            raise RuntimeError(answer["error"])
        return answer


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
