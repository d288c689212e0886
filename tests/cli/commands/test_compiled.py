"""`amago export --format aoti`: a form that AOTInductor compiles, which is loaded only where it is trusted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipelines.errors import InputMissing
from pipelines.export import forms, graph
from tests.cli.commands.test_verify import exported as exported
from tests.cli.commands.test_verify import forged
from tests.cli.conftest import Amago, call


@pytest.fixture(scope="module")
def compiled(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with the compiled form, made once."""
    try:
        forms.require_packages((forms.AOTI,))
    except InputMissing as error:
        pytest.skip(error.message)
    to = tmp_path_factory.mktemp("compiled") / "bundle"
    done = call("export", exported, "--to", to, "--format", "aoti", "--set", "export.episodes=4", "--output", "json")
    assert done.code == 0, done.err
    assert done.json["metrics"]["parity"]["aoti"]["holds"]
    return to


@pytest.fixture
def bundle(compiled: Path, tmp_path: Path) -> Path:
    """A copy that a test may alter."""
    return Path(shutil.copytree(compiled, tmp_path / "bundle"))


@pytest.mark.full
def test_a_compiled_form_acts_as_the_weights_do(amago: Amago, bundle: Path) -> None:
    found = amago("verify", bundle, "--trust", "--output", "json")
    assert found.code == 0, found.err
    agreement = found.json["metrics"]["forms"]["aoti"]
    assert (agreement["holds"], agreement["steps"], agreement["tolerance"]) == (True, 1_000, 1e-4)

    def score(actors: int, *options: object) -> float:
        done = amago(
            "evaluate", bundle, "--episodes", 6, "--set", f"evaluate.actors={actors}", "--output", "json", *options
        )
        assert done.code == 0, done.err
        return float(done.json["metrics"]["return_mean"])

    for actors in (1, 6):
        assert score(actors, "--form", "aoti", "--trust") == score(actors)


@pytest.mark.full
def test_it_is_never_loaded_without_trust(amago: Amago, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []
    monkeypatch.setattr(graph, "load_compiled", lambda content: loaded.append(len(content)))
    found = amago("verify", bundle, "--output", "json")
    assert found.code == 0, found.err
    assert "policy.aoti.pt2 needs --trust" in found.json["metrics"]["untried"]["aoti"]
    refused = amago("evaluate", bundle, "--form", "aoti", "--episodes", 2)
    assert (refused.code, "it is compiled code" in refused.err) == (3, True), refused.err
    assert loaded == []


@pytest.mark.full
def test_a_form_for_another_machine_or_none_is_refused(amago: Amago, bundle: Path) -> None:
    command = ("evaluate", bundle, "--form", "aoti", "--episodes", 2, "--trust")
    forged(bundle, compiled=forms.describe_target() | {"torch": "torch 1.0"})
    refused = amago(*command)
    assert (refused.code, "was compiled for torch 1.0" in refused.err) == (3, True), refused.err
    (bundle / "policy.aoti.pt2").write_bytes(b"x" * 99)
    forged(bundle, compiled=forms.describe_target())
    refused = amago(*command)
    assert (refused.code, "Traceback" in refused.err, "damaged" in refused.err) == (4, False, True), refused.err


def test_without_a_compiler_it_is_refused_in_a_line(amago: Amago) -> None:
    import torch._inductor.config as inductor

    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
        failed = amago("export", "zoo:tmaze", "--to", "maze", "--format", "aoti")
    assert (failed.code, "there is no C++ compiler here" in failed.err) == (3, True), failed.err
    assert not Path("maze").exists()
