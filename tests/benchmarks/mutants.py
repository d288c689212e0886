"""Changes the engine in small ways, one at a time, and counts the changes that the tests notice.

    python tests/benchmarks/mutants.py --room lake [--number 20] [--seed 1] [--to FILE.jsonl]

A mutant is the engine with one change: a comparison turned or moved by one, `and` for `or`, + for -, a number raised, a
condition negated, a call left out, a result replaced by None. The places are drawn from a room of `pipelines/`, each as
likely as another. The tests named after the module run first, then those of its room, then others that import it, in a
copy of the checkout as it was committed. They are those of the quick tier: a mutant that starts processes without end
would take the machine with it. A mutant that survives is a behaviour that no test states, or none of this tier, a line
that does nothing, or a change without effect: read it and decide.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
QUICK = "not full and not system and not slow and not gpu and not ray"
TEST_SECONDS = 120  # of one test, after which the mutant counts as killed: it made an endless loop

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Add,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


@dataclass(frozen=True)
class Mutant:
    """One change: the file, the line, and the text of the lines `first` to `last` before and after it."""

    path: str
    first: int
    last: int
    before: str
    after: str

    def write(self, root: Path) -> None:
        """Write the changed file into the checkout at `root`."""
        lines = (ROOT / self.path).read_text().splitlines(keepends=True)
        (root / self.path).write_text("".join([*lines[: self.first - 1], self.after + "\n", *lines[self.last :]]))


def find_mutants(path: Path) -> Iterator[Mutant]:
    """The mutants of a file. Messages of errors, annotations and what runs at import alone are left as they are."""
    source = path.read_bytes()
    lines = source.splitlines()  # in bytes, which the offsets of nodes count
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                yield from _mutate_within(statement, lines, path)


def _mutate_within(node: ast.AST, lines: list[bytes], path: Path) -> Iterator[Mutant]:
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import):
        return  # a function within this one has its own turn
    if isinstance(node, ast.AnnAssign):
        node.annotation = ast.Constant(None)
    for changed in _change(node):
        yield _replace(node, changed, lines, path)
    for child in ast.iter_child_nodes(node):
        yield from _mutate_within(child, lines, path)


def _change(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left, [operator], rights):
            for other in COMPARISONS[type(operator)]:
                yield ast.Compare(left, [other()], rights)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.BinOp(left, operator, right) if type(operator) in OPERATIONS:
            if not isinstance(left, ast.JoinedStr) and not isinstance(right, ast.JoinedStr):
                yield ast.BinOp(left, OPERATIONS[type(operator)](), right)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as value):
            yield ast.Constant(value + 1)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Return(ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()


def _replace(node: ast.AST, changed: ast.AST, lines: list[bytes], path: Path) -> Mutant:
    first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
    head = lines[first - 1][: node.col_offset].decode()  # type: ignore[attr-defined]
    tail = lines[last - 1][node.end_col_offset :].decode()  # type: ignore[attr-defined]
    text = ast.unparse(changed)
    after = f"{head}({text}){tail}" if isinstance(changed, ast.expr) else f"{head}{text}{tail}"
    before = b"\n".join(lines[first - 1 : last]).decode()
    return Mutant(str(path.relative_to(ROOT)), first, last, before, after)


def order_tests(module: str, tests: Path) -> list[str]:
    """The files of tests that run for a module such as `pipelines/lake/writer.py`, in this order: those named after it,
    those of its room, those elsewhere that import it.
    """
    path = Path(module)
    room = path.parts[1]
    dotted = ".".join(path.with_suffix("").parts)
    parent, name = dotted.rsplit(".", 1)
    files = sorted(tests.rglob("test_*.py"))
    importers = [one for one in files if dotted in (text := one.read_text()) or _imports(text, parent, name)]
    own = [one for one in files if one.stem == f"test_{path.stem}" and room in one.relative_to(tests).parts]
    within = [one for one in files if one.relative_to(tests).parts[0] == room]
    near = [one for one in importers if one in within]
    return [str(one) for one in dict.fromkeys([*own, *near, *within, *importers])]


def _imports(text: str, parent: str, name: str) -> bool:
    return any(line.startswith(f"from {parent} import") and name in line.split() for line in text.splitlines())


def try_mutant(mutant: Mutant, checkout: Path, *, seconds: float) -> tuple[str, float]:
    """Run the tests over a mutant: ("killed", "survived" or "survived so far", wall-clock seconds)."""
    target = checkout / mutant.path
    original = target.read_text()
    mutant.write(checkout)
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"--timeout={TEST_SECONDS}", "-m", QUICK, *order_tests(mutant.path, checkout / "tests")]
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    tests = subprocess.Popen(command, cwd=checkout, env=environment, start_new_session=True, **streams)
    try:
        outcome = "survived" if tests.wait(timeout=seconds) == 0 else "killed"
    except subprocess.TimeoutExpired:
        outcome = "survived so far"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()
        target.write_text(original)
    return outcome, time.monotonic() - began


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--room", required=True, help="a folder of pipelines/, such as lake")
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300, help="of the tests of one mutant")
    parser.add_argument("--to", type=Path, help="a file of JSON lines to which every outcome is added")
    chosen = parser.parse_args(arguments)
    files = sorted((ROOT / "pipelines" / chosen.room).rglob("*.py"))
    everything = [mutant for path in files for mutant in find_mutants(path)]
    drawn = random.Random(chosen.seed).sample(everything, min(chosen.number, len(everything)))
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
        for mutant in drawn:
            outcome, seconds = try_mutant(mutant, checkout, seconds=chosen.seconds)
            killed += outcome == "killed"
            if chosen.to is not None:
                with chosen.to.open("a") as stream:
                    row = {"room": chosen.room, "seed": chosen.seed, "outcome": outcome, "seconds": round(seconds, 1)}
                    stream.write(json.dumps(row | asdict(mutant)) + "\n")
            print(f"{outcome} after {seconds:.0f} s: {mutant.path}:{mutant.first}", flush=True)
            if outcome != "killed":
                print("".join(f"  - {line}\n" for line in mutant.before.splitlines()), end="")
                print("".join(f"  + {line}\n" for line in mutant.after.splitlines()), end="", flush=True)
    print(f"{chosen.room}: {killed} of {len(drawn)} killed, of {len(everything):,} that can be drawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
