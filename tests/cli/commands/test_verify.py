"""`amago export --format onnx` and `amago verify`, on a bundle of a trained run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipelines.files.checksums import seal
from tests.cli.conftest import Amago

pytestmark = pytest.mark.full


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with all forms, made once."""
    pytest.importorskip("onnxruntime")
    from pipelines.stages import collect, export, train
    from tests.stages.recipes import tiny

    run = tmp_path_factory.mktemp("exported") / "run"
    settings = tiny(export={"format": ("onnx", "torch"), "episodes": 4})
    collect.run(settings, run=run)
    train.run(settings, run=run, lakes=[(run / "lake", 1.0)])
    result = export.run(settings, run=run)
    assert {form: found["holds"] for form, found in result.metrics["parity"].items()} == {"onnx": True, "torch": True}
    return Path(result.outputs[0])


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    """A copy of the bundle that a test may alter."""
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


def forged(bundle: Path, more: tuple[str, ...] = (), **changes: object) -> None:
    """Change policy.json or files of a bundle, with matching checksums."""
    record = json.loads((bundle / "policy.json").read_text())
    names = [*record.pop("files"), *more]
    record.pop("checksum")
    files = {name: (bundle / name).read_bytes() for name in names}
    (bundle / "policy.json").write_bytes(seal(record | changes, files))


def test_forms_hold(amago: Amago, bundle: Path) -> None:
    found = amago("verify", bundle, "--output", "json")
    assert found.code == 0, found.err
    forms = found.json["metrics"]["forms"]
    assert set(forms) == {"weights", "onnx"}
    assert all(form["holds"] and form["steps"] == 1_000 and form["resets"] > 8 for form in forms.values())
    assert "--trust" in found.json["metrics"]["untried"]["torch"]
    trusted = amago("verify", bundle, "--trust", "--output", "json")
    assert set(trusted.json["metrics"]["forms"]) == {"weights", "onnx", "torch"}


def test_the_evaluations_are_the_same(exported: Path) -> None:
    report = json.loads((exported / "parity.json").read_text())
    scores = {form: found["return_mean"] for form, found in report["evaluations"].items()}
    assert set(scores) == {"original", "onnx", "torch"}
    assert len(set(scores.values())) == 1


@pytest.mark.parametrize("name", ["policy.onnx", "policy.pt2", "policy.py", "parity.npz", "weights.safetensors"])
def test_one_altered_bit_is_refused(amago: Amago, bundle: Path, name: str) -> None:
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)
    refused = amago("verify", bundle)
    assert refused.code == 4
    assert f"{name} is not as it was written" in refused.err


@pytest.mark.parametrize("how", ["--greedy", "--sample"])
def test_a_form_scores_what_the_weights_score(amago: Amago, bundle: Path, how: str) -> None:
    def score(*options: object) -> dict[str, float]:
        done = amago("evaluate", bundle, how, "--episodes", 6, "--output", "json", *options)
        assert done.code == 0, done.err
        return {key: done.json["metrics"][key] for key in ("return_mean", "return_std", "length_mean")}

    assert score("--form", "onnx") == score() == score("--form", "onnx", "--evaluators", 2)
    assert score("--form", "torch", "--trust") == score()


@pytest.mark.parametrize(
    ("content", "form", "code", "words"),
    [(b"", "onnx", 4, "damaged"), (b"x" * 99, "onnx", 4, "damaged"), (b"", "torch", 3, "--trust")],
)
def test_a_form_that_is_none_is_refused(
    amago: Amago, bundle: Path, content: bytes, form: str, code: int, words: str
) -> None:
    (bundle / "policy.onnx").write_bytes(content)
    forged(bundle)
    for command in (["evaluate", bundle, "--episodes", 2, "--form", form], ["verify", bundle]):
        refused = amago(*command)
        assert "Traceback" not in refused.err
        assert refused.code == (code if command[0] == "evaluate" else 4), refused.err
        assert words in refused.err or command[0] == "verify"


def test_another_policy_does_not_hold(amago: Amago, bundle: Path) -> None:
    recorded = dict(np.load(bundle / "parity.npz"))
    recorded["parameters"] = recorded["parameters"] + np.float32(0.01)
    np.savez(bundle / "parity.npz", **recorded)
    forged(bundle)
    refused = amago("verify", bundle)
    assert refused.code == 4
    assert "does not act as the policy did" in refused.err


@pytest.mark.parametrize("weights", ["float16", "int8"])
def test_smaller_weights_hold_within_their_own_limits(
    amago: Amago, exported: Path, tmp_path: Path, weights: str
) -> None:
    small = tmp_path / "small"
    options = ["--format", "onnx", "--weights", weights, "--set", "export.episodes=4"]
    done = amago("export", exported, "--to", small, *options)
    assert done.code == 0, done.err
    assert b".narrow" in (small / "policy.onnx").read_bytes()
    assert b".narrow" not in (exported / "policy.onnx").read_bytes()
    found = amago("verify", small, "--output", "json")
    assert found.code == 0, found.err
    forms = found.json["metrics"]["forms"]
    assert forms["onnx"]["tolerance"] == json.loads((small / "policy.json").read_text())["parity"]["parameters"] > 0.01
    assert forms["weights"]["tolerance"] < 0.001  # the policy itself is what it was
    alone = subprocess.run([sys.executable, "policy.py"], cwd=small, capture_output=True, text=True, check=False)
    assert alone.returncode == 0, alone.stderr
    if weights == "int8":
        forged(small, weights="float32")
        assert amago("verify", small).code == 4
    forged(small, weights="int1")
    assert amago("verify", small).code == 4


def test_a_hostile_bundle_executes_nothing(amago: Amago, bundle: Path, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    (bundle / "policy.py").write_text(f"open({str(mark)!r}, 'w')")
    (bundle / "policy.pt2").write_bytes(b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.")
    forged(bundle)
    assert amago("verify", bundle).code == 0
    forged(bundle, memory={"time": [[1 << 40], "int64"]})
    assert amago("verify", bundle).code == 4
    forged(bundle, memory={"time": ["x"]})
    assert amago("verify", bundle).code == 4
    (bundle.parent / "outside").write_bytes(b"x")
    forged(bundle, more=("../outside",))
    refused = amago("verify", bundle)
    assert refused.code == 4
    assert "outside its directory" in refused.err
    assert not mark.exists()


def test_the_runtime_needs_numpy_and_onnxruntime_alone(bundle: Path) -> None:
    """In a process in which this package, torch, pyarrow, duckdb and gymnasium cannot be imported."""
    hide = "import sys; [sys.modules.__setitem__(name, None) for name in "
    hide += "('pipelines', 'amago_cli', 'torch', 'pyarrow', 'duckdb', 'gymnasium', 'pydantic', 'safetensors')]; "
    code = hide + "import policy; d, e = policy.verify(); assert d < 1e-4 and e == 1, (d, e)\n"
    code += "p = policy.OnnxPolicy(greedy=True); a = [p.act([0.0, 0.0]) for _ in range(3)]\n"
    code += "p.reset(); assert p.act([0.0, 0.0]) == a[0]\n"
    code += "q = policy.OnnxPolicy(actors=2, greedy=False, seed=1); print(q.act([[0.0, 0.0]] * 2, [0.0, 1.0]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=bundle, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["verify", "nowhere"], 3, "no policy bundle at 'nowhere'"),
        (["export", "small", "--format", "onnx", "--format", "npz"], 2, "give forms of the policy"),
        (["export", "small", "--format", "onxx"], 2, "onnx"),
        (["export", "small", "--weights", "int8"], 2, "add it to format"),
    ],
)
def test_mistakes_are_named(amago: Amago, small: Path, arguments: list[str], code: int, words: str) -> None:
    failed = amago(*arguments)
    assert (failed.code, "Traceback" in failed.err) == (code, False), failed.err
    assert words in failed.err
