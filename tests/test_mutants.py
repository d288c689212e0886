"""The mutants that tests are measured by."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.benchmarks.mutants import ROOT, find_mutants, order_tests

MODULE = "pipelines/relabelers/rewards.py"


def test_a_mutant_is_another_program_that_differs_in_its_lines_alone(tmp_path: Path) -> None:
    original = (ROOT / MODULE).read_text()
    (tmp_path / MODULE).parent.mkdir(parents=True)
    mutants = list(find_mutants(ROOT / MODULE))
    assert len(set(mutants)) == len(mutants) > 50
    for mutant in mutants[::10]:
        mutant.write(tmp_path)
        changed = (tmp_path / MODULE).read_text()
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(original))
        before, after = original.splitlines(), changed.splitlines()
        assert before[: mutant.first - 1] == after[: mutant.first - 1]
        rest = len(before) - mutant.last
        assert rest == 0 or before[-rest:] == after[-rest:]


@pytest.mark.parametrize(
    ("line", "mutants"),
    [
        ("return a < b", {"return (a <= b)", "return (a >= b)", "return None"}),
        ("return a and not b", {"return (a or not b)", "return a and (b)", "return None"}),
        ("raise ValueError(1 + 1)", set()),
        ("do(2)", {"pass", "do((3))"}),
    ],
)
def test_mutants_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, mutants: set[str]) -> None:
    monkeypatch.setattr("tests.benchmarks.mutants.ROOT", tmp_path)
    (tmp_path / "m.py").write_text(f"def f(a, b):\n    {line}\n")
    assert {mutant.after.strip() for mutant in find_mutants(tmp_path / "m.py")} == mutants


@pytest.mark.system
def test_the_tests_named_after_a_module_come_first_and_then_those_of_its_room() -> None:
    found = [Path(name).relative_to(ROOT / "tests") for name in order_tests(MODULE, ROOT / "tests")]
    assert found[0] == Path("relabelers/test_rewards.py")
    rooms = [path.parts[0] for path in found]
    assert rooms[: rooms.count("relabelers")] == ["relabelers"] * rooms.count("relabelers")
    assert len(set(found)) == len(found)
