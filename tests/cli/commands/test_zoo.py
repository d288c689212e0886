"""`zoo:NAME` where a bundle is named."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest

from pipelines import load_policy
from pipelines.config import places, policy_files
from pipelines.config.places import find_bundle
from pipelines.errors import AmagoError, InputMissing
from pipelines.events import silent
from pipelines.learning import bundle
from pipelines.report import onnxruntime_web
from tests.cli.conftest import Amago


@pytest.mark.system
def test_names_of_the_zoo_are_bundles_everywhere(amago: Amago) -> None:
    assert find_bundle("zoo:tmaze") == places.locate_in_zoo("tmaze")
    assert load_policy("zoo:cartpole").act(np.zeros(4, np.float32)) in (0, 1)
    found = amago("evaluate", "zoo:tmaze", "--episodes", 4, "--output", "json")
    assert "None" not in found.err
    assert found.code == 0, found.err
    assert found.json["metrics"]["episodes"] == 4
    assert amago("verify", "zoo:tmaze").code == 0


def test_an_unknown_name_is_answered_with_the_nearest(amago: Amago) -> None:
    with pytest.raises(InputMissing, match="no policy 'tmase' in the zoo"):
        find_bundle("zoo:tmase")
    for command in ("evaluate", "verify", "export"):
        failed = amago(command, "zoo:tmase")
        assert (failed.code, "Traceback" in failed.err) == (3, False)
        assert "did you mean 'zoo:tmaze'?" in failed.err


def test_a_bundle_is_exported_to_another_directory(amago: Amago) -> None:
    done = amago("export", "zoo:cartpole", "--to", "balance", "--output", "json")
    assert done.code == 0, done.err
    theirs, mine = (bundle.read(Path(path)) for path in (places.locate_in_zoo("cartpole"), "balance"))
    assert {name: tensor.tolist() for name, tensor in theirs.acting.items()} == {
        name: tensor.tolist() for name, tensor in mine.acting.items()
    }
    assert amago("verify", "balance").code == 0
    for arguments in (["--dry-run"], [], ["--to", str(places.locate_in_zoo("cartpole"))]):
        assert "--to DIR" in amago("export", "zoo:cartpole", *arguments).err
    assert "no trajectories" in amago("export", "balance", "--to", "other", "--format", "npz").err


@pytest.mark.full
def test_a_page_of_the_zoo_is_made_without_a_network(amago: Amago, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    try:
        runtime = onnxruntime_web.read_files("", silent)
    except AmagoError as error:
        pytest.skip(str(error))
    dist = Path("package/dist")
    dist.mkdir(parents=True)
    for name, content in runtime.items():
        (dist / name).write_bytes(content)

    def refuse(*_: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("AMAGO_CACHE", "empty")
    options = ["--format", "page", "--set", "export.onnxruntime_web=package", "--set", "export.episodes=4"]
    done = amago("export", "zoo:quickstart", "--to", "demo", *options, "--output", "json")
    assert done.code == 0, done.err
    assert done.json["metrics"]["parity"]["onnx"]["holds"]
    page = Path("demo/page.html").read_text()
    assert "connect-src" not in page
    assert "default-src 'none'" in page
    assert set(policy_files.read_record(Path("demo"))["files"]) >= {"page.html", "policy.onnx", "policy.mjs"}
    assert amago("verify", "demo").code == 0


def test_a_page_of_another_environment_is_refused_in_a_line(amago: Amago) -> None:
    failed = amago("export", "zoo:tmaze", "--format", "page", "--to", "demo")
    assert (failed.code, "a page shows meta-frozen-lake" in failed.err) == (2, True), failed.err
    assert not Path("demo").exists()
    failed = amago("export", "zoo:cartpole", "--format", "page", "--to", "demo")
    assert (failed.code, "one with the encoder 'identity' has none" in failed.err) == (2, True), failed.err
