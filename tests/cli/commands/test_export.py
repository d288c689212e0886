from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.export import parity
from pipelines.files.checksums import seal
from tests.cli.conftest import Amago
from tests.tiers import some


def test_a_bundle_is_written_where_asked(amago: Amago, small: Path) -> None:
    done = amago("export", small, "--to", "out/bundle", "--output", "json")
    assert done.code == 0, done.err
    assert [Path(path) for path in done.json["outputs"]] == [Path("out/bundle")]
    assert list(Path("out/bundle").glob("*.safetensors"))


@pytest.mark.parametrize("damage", ["", "policy.json"])
def test_files_of_the_bundle_before_are_removed(amago: Amago, small: Path, damage: str) -> None:
    """A graph of another policy would pass for one of this bundle; what is not of a bundle stays."""
    assert amago("export", "small", "--to", "b").code == 0
    record = json.loads(Path("b/policy.json").read_text())
    Path("b/policy.onnx").write_text("graph of another policy")
    Path("b/notes.txt").write_text("mine")
    sealed = seal(
        {key: value for key, value in record.items() if key not in ("files", "checksum")}, {"policy.onnx": b""}
    )
    Path("b/policy.json").write_bytes(b"cut" if damage else sealed)
    assert amago("export", "small", "--to", "b").code == 0
    assert {path.name for path in Path("b").iterdir()} == {
        "policy.json",
        "policy.py",
        "weights.safetensors",
        "notes.txt",
    }
    assert amago("verify", "b").code == 0


def test_a_directory_of_something_else_is_not_written_to(amago: Amago, small: Path) -> None:
    Path("c").mkdir()
    for name in ("README.md", "policy.json"):
        Path("c", name).write_text("mine")
    refused = amago("export", "small", "--to", "c", "--card")
    assert refused.code == 2
    assert "'c' contains no policy bundle, but other files: README.md, policy.json" in refused.err
    assert {path.read_text() for path in Path("c").iterdir()} == {"mine"}


def test_the_default_place_is_inside_the_run(amago: Amago, small: Path) -> None:
    assert amago("export", small, "--dry-run", "--output", "json").json["outputs"] == ["small/export"]
    assert not (small / "export").exists()


@pytest.mark.parametrize("form", some(["npz", "parquet"], 1))
def test_trajectories_are_written_beside_the_lake_of_a_run(amago: Amago, small: Path, form: str) -> None:
    done = amago("export", small, "--format", form, "--where", "length > 10", "--output", "json")
    assert done.code == 0, done.err
    sql = "select count(*) as trajectories, sum(length) as steps from trajectories where length > 10"
    (known,) = amago("lake", "sql", small, sql, "--output", "json").json
    assert known.items() <= done.json["metrics"].items()
    assert done.json["outputs"] == ["small/dataset"]
    again = amago("export", small, "--format", form, "--where", "length > 10", "--output", "json")
    assert again.json["status"] == "skipped"


def test_a_bare_lake_needs_a_form_and_a_place(amago: Amago, small: Path) -> None:
    (small / "lake").rename("bare")
    assert "has no policy" in amago("export", "bare").err
    assert amago("export", "bare").code == 2
    assert "--to" in amago("export", "bare", "--format", "npz").err
    assert amago("export", "bare", "--format", "npz", "--to", "out").code == 0
    assert amago("export", "bare", "--format", "npz", "--to", "out", "--where", "length > 1e6").code == 3


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere"], 3, "no run at 'nowhere'"),
        (["small", "--format", "onx"], 2, "export.format"),
        (["small", "--format", "onx"], 2, "did you mean 'onnx'?"),
        (["small", "--format", "csv"], 2, "parquet"),
        (["small", "--where", "success"], 2, "--format"),
        (["small", "--checkpoint", "99"], 3, "99"),
    ],
)
def test_mistakes_are_named_without_a_traceback(
    amago: Amago, small: Path, arguments: list[str], code: int, words: str
) -> None:
    failed = amago("export", *arguments)
    assert failed.code == code, failed.err
    assert words in failed.err
    assert "Traceback" not in failed.err


def test_a_card_lies_beside_the_policy(amago: Amago, small: Path) -> None:
    done = amago("export", small, "--to", "shared", "--card", "--set", "export.licence=mit")
    assert done.code == 0, done.err
    text = Path("shared/README.md").read_text()
    assert 'license: "mit"' in text
    assert "amago verify" in text
    Path("shared/README.md").write_text("edited")  # users do
    assert amago("verify", "shared").code == 0


@pytest.mark.system
def test_the_proof_uses_one_thread(amago: Amago, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that share the steps of four actors cost three times the CPU time."""
    pytest.importorskip("onnxruntime", reason='pip install "amago[onnx]"')
    counts = []

    def count_threads(*given: Any, **more: Any) -> Any:
        counts.append(torch.get_num_threads())
        return compare(*given, **more)

    compare, before = parity.compare, torch.get_num_threads()
    monkeypatch.setattr(parity, "compare", count_threads)
    torch.set_num_threads(2)
    try:
        done = amago("export", small, "--to", "policy", "--format", "onnx", "--set", "export.episodes=0")
        assert (done.code, counts, torch.get_num_threads()) == (0, [1], 2), done.err
    finally:
        torch.set_num_threads(before)


def test_missing_packages_of_a_page_are_one_line(amago: Amago, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    for form in ("onnx", "page"):
        failed = amago("export", small, "--to", "policy", "--format", form, "-q")
        assert (failed.code, failed.err.count("\n"), Path("policy").exists()) == (3, 1, False), failed.err
        assert f"--format {form} needs the extra 'onnx'" in failed.err
        assert 'pip install "amago[onnx]"' in failed.err
