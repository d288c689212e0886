"""Published rulesets are converted without running what a pickle could hide."""

from __future__ import annotations

import bz2
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from pipelines.envs.suites.xland_rulesets import Rulesets, convert, read
from pipelines.errors import InputMissing, IntegrityError


def published(path: Path, protocol: int = -1, **changes) -> Path:
    """A file as the authors write them."""
    made = Rulesets.generate("small", 50, seed=3)
    content = {
        "goals": made.goals,
        "rules": made.rules,
        "init_tiles": made.tiles,
        "num_rules": (made.rules[:, :, 0] > 0).sum(axis=1).astype(np.uint8),
    }
    with bz2.open(path, "wb") as file:
        pickle.dump({**content, **changes}, file, protocol=protocol)
    return path


@pytest.mark.parametrize("protocol", [2, 4, -1])
def test_converted_rulesets_are_the_published_ones(tmp_path, protocol):
    made = Rulesets.generate("small", 50, seed=3)
    assert convert(published(tmp_path / "small_1m_v3", protocol), tmp_path / "small.npz") == 50
    found = Rulesets.load(tmp_path / "small.npz")
    np.testing.assert_array_equal(found.goals, made.goals)
    np.testing.assert_array_equal(found.rules, made.rules)
    np.testing.assert_array_equal(found.tiles, made.tiles)


def test_a_pickle_by_numpy_1_is_read(tmp_path):
    path = published(tmp_path / "file", protocol=2)
    content = bz2.decompress(path.read_bytes())
    assert b"numpy._core.multiarray" in content
    path.write_bytes(bz2.compress(content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")))
    assert len(read(path)) == 50


class Harmful:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, -1])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run_it(tmp_path, protocol):
    mark = tmp_path / "mark"
    path = published(tmp_path / "file", protocol, num_rules=Harmful(os.mkdir, str(mark)))
    with pytest.raises(IntegrityError, match=r"names posix.mkdir, which is not an array"):
        convert(path, tmp_path / "out.npz")
    assert not mark.exists()
    assert not (tmp_path / "out.npz").exists()


@pytest.mark.parametrize(
    "changes", [{"goals": np.zeros((50, 4), np.uint8)}, {"rules": [1, 2]}, {"init_tiles": np.zeros((50, 3, 2))}]
)
def test_other_arrays_are_refused(tmp_path, changes):
    with pytest.raises(IntegrityError, match="is not a rulesets file"):
        read(published(tmp_path / "file", **changes))


@pytest.mark.parametrize("content", [b"", b"BZh9", b"plain", bz2.compress(b"garbage"), bz2.compress(pickle.dumps(3))])
def test_what_is_not_a_benchmark_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(IntegrityError, match="is not a published benchmark"):
        read(tmp_path / "file")


def test_an_absent_file_is_missing(tmp_path):
    with pytest.raises(InputMissing):
        convert(tmp_path / "absent", tmp_path / "out.npz")


def test_a_published_file_given_to_the_environment_names_the_converter(tmp_path):
    with pytest.raises(IntegrityError) as caught:
        Rulesets.load(published(tmp_path / "medium_1m_v3"))
    assert "xland_rulesets.convert" in (caught.value.hint or "")
