"""`zoo:NAME` where a bundle is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines import load_policy
from pipelines.config import zoo
from pipelines.config.places import bundle_directory
from pipelines.errors import InputMissing
from pipelines.learning import bundle
from tests.cli.conftest import Amago


def test_names_of_the_zoo_are_bundles_everywhere(amago: Amago) -> None:
    assert bundle_directory("zoo:tmaze") == zoo.directory("tmaze")
    assert load_policy("zoo:cartpole").act(np.zeros(4, np.float32)) in (0, 1)
    found = amago("evaluate", "zoo:tmaze", "--episodes", 4, "--output", "json")
    assert found.code == 0, found.err
    assert found.json["metrics"]["episodes"] == 4
    assert amago("verify", "zoo:tmaze").code == 0


def test_an_unknown_name_is_answered_with_the_nearest(amago: Amago) -> None:
    with pytest.raises(InputMissing, match="no policy 'tmase' in the zoo"):
        bundle_directory("zoo:tmase")
    for command in ("evaluate", "verify", "export"):
        failed = amago(command, "zoo:tmase")
        assert (failed.code, "Traceback" in failed.err) == (3, False)
        assert "did you mean 'zoo:tmaze'?" in failed.err


def test_a_bundle_is_exported_to_another_directory(amago: Amago) -> None:
    done = amago("export", "zoo:cartpole", "--to", "balance", "--output", "json")
    assert done.code == 0, done.err
    theirs, mine = (bundle.read(Path(path)) for path in (zoo.directory("cartpole"), "balance"))
    assert {name: tensor.tolist() for name, tensor in theirs.acting.items()} == {
        name: tensor.tolist() for name, tensor in mine.acting.items()
    }
    assert amago("verify", "balance").code == 0
    for arguments in (["--dry-run"], [], ["--to", str(zoo.directory("cartpole"))]):
        assert "--to DIR" in amago("export", "zoo:cartpole", *arguments).err
    assert "no trajectories" in amago("export", "balance", "--to", "other", "--format", "npz").err
