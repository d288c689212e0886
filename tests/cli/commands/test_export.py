from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Amago


def test_a_bundle_is_written_where_asked(amago: Amago, small: Path) -> None:
    done = amago("export", small, "--to", "out/bundle", "--output", "json")
    assert done.code == 0, done.err
    assert [Path(path) for path in done.json["outputs"]] == [Path("out/bundle")]
    assert list(Path("out/bundle").glob("*.safetensors"))


def test_the_default_place_is_inside_the_run(amago: Amago, small: Path) -> None:
    assert amago("export", small, "--dry-run", "--output", "json").json["outputs"] == ["small/export"]
    assert not (small / "export").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere"], 3, "no run at 'nowhere'"),
        (["small", "--format", "onx"], 2, "export.format"),
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
