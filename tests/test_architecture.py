"""The rules of the code base, checked by reading the source: which module imports which, that the engine never prints.

Each rule lists everything that breaks it, in one test for the whole tree.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("amago_cli", "pipelines")
SHORT_WAIT, LONG_WAIT = 2, 600  # seconds
CLOCKS = re.compile(r"(monotonic|perf_counter|time\.time)\(\)")

# From the top down: a module imports only from lower layers and its own package. Packages of one line are siblings.
LAYERS = (
    ("amago_cli",),
    ("stages",),
    ("view", "serve"),
    ("report",),
    ("runs",),
    ("export",),
    ("training", "evaluation"),
    ("tracking",),
    ("rollout",),
    ("relabelers",),
    ("learning",),
    ("envs", "formats"),
    ("nets", "data"),
    ("lake",),
    ("config",),
    ("files", "web"),
    ("processes",),
    ("registry",),
    ("trust",),
    ("events", "errors", "nearest"),
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}

# The only modules that may import these.
ONLY_IN = {
    "duckdb": tuple(f"pipelines/lake/sql/{name}.py" for name in ("catalog", "query", "tables")),
    "huggingface_hub": ("pipelines/files/hub.py",),
    "obstore": ("pipelines/lake/bucket.py",),
    "flash_attn": ("pipelines/nets/attention.py",),
    "vl_convert": ("pipelines/report/",),
    "starlette": ("pipelines/view/", "pipelines/serve/", "pipelines/web/"),
    "uvicorn": ("amago_cli/serving.py",),
    "optuna": ("pipelines/stages/tune.py",),
    "ray": ("pipelines/stages/ray_engine.py",),
    "typer": ("amago_cli/",),
    "rich": ("amago_cli/",),
    "tqdm": ("amago_cli/",),
    "difflib": ("pipelines/nearest.py",),
    "pyarrow": ("pipelines/lake/", "pipelines/formats/"),
}
NEVER_IN = {"pipelines/lake/": ("torch", "gymnasium"), "pipelines/data/": ("torch", "gymnasium")}
NEVER_IN["pipelines/runs/"] = ("torch", "gymnasium")


def python_files(*folders: str) -> list[Path]:
    """Return the Python files of folders, without the templates of `amago init`."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if path.parent.name != "starter")


def modules() -> list[Path]:
    return python_files(*PACKAGES)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(source(path), str(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


@functools.cache
def imports(path: Path) -> tuple[tuple[str, bool], ...]:
    """Return every module that `path` imports, at any depth, each with whether it is only for type checking."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    typing_only = {
        inner
        for node in nodes(path)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if module in PACKAGES:  # `from pipelines import errors`
                yield from ((f"{module}.{alias.name}", node in typing_only) for alias in node.names)
            else:
                yield module, node in typing_only


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """Keep the million nodes of all syntax trees for the tests of this module, unseen by the garbage collector."""
    gc.disable()
    yield
    for cached in (nodes, tree, source):
        cached.cache_clear()
    gc.enable()


def layer(module: str) -> str | None:
    """Return the layer of a module: `pipelines.lake.store` -> "lake"; None for third-party modules."""
    parts = module.split(".")
    if parts[0] == "amago_cli":
        return "amago_cli"
    return parts[1] if parts[0] == "pipelines" and len(parts) > 1 else None


def check(violations: Iterable[str]) -> None:
    """Fail with one line per violation."""
    found = list(violations)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.system
def test_imports_are_absolute() -> None:
    check(
        f"{name_of(path)} imports {module}"
        for path in modules()
        for module, _ in imports(path)
        if module.startswith(".")
    )


def test_every_package_is_in_a_layer() -> None:
    owned = {path: layer(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in modules()}
    check(name_of(path) for path, own in owned.items() if own not in (None, "__init__", *LEVEL))


def test_imports_point_down() -> None:
    check(violation for path in modules() for violation in _upward_imports(path))


def _upward_imports(path: Path) -> Iterator[str]:
    own = layer(".".join(path.relative_to(ROOT).with_suffix("").parts))
    is_interface = own == "__init__"  # `pipelines/__init__.py` names the public interface, imported lazily
    for module, typing_only in imports(path):
        other = layer(module)
        if other is None or other == own or (is_interface and typing_only):
            continue
        if is_interface or other not in LEVEL or own not in LEVEL or LEVEL[other] <= LEVEL[own]:
            yield f"{name_of(path)} imports {module}: {own} is not above {other}"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Imports inside functions count: they would only hide the circle."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules()}
    left = {name: _imported(path) & names.keys() for name, path in names.items()}
    while free := {name for name, needed in left.items() if not needed & left.keys()}:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert not left


def _imported(path: Path) -> set[str]:
    found = {module for module, typing_only in imports(path) if not typing_only}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names if f"{node.module}" in found}
    return found


def test_each_dependency_is_imported_only_where_it_belongs() -> None:
    check(violation for path in modules() for violation in _misplaced_imports(path))


def _misplaced_imports(path: Path) -> Iterator[str]:
    name = name_of(path)
    banned = {package for folder, packages in NEVER_IN.items() if name.startswith(folder) for package in packages}
    for module, typing_only in imports(path):
        package = module.split(".")[0]
        is_allowed = typing_only or name.startswith(ONLY_IN.get(package, ""))
        if package in banned or not is_allowed:
            yield f"{name} imports {module}"


def test_the_engine_is_silent() -> None:
    banned = ("print", "input", "sys.exit", "exit", "sys.stdout.write", "sys.stderr.write")
    calls = (
        (path, node, ast.unparse(node.func))
        for path in python_files("pipelines")
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    )
    check(f"{name_of(path)}:{node.lineno} calls {called}" for path, node, called in calls if called in banned)


def test_slow_imports_are_not_at_the_top_of_a_module() -> None:
    """A package that takes a second to import is imported at the top only by modules that are about it."""
    check(violation for path in modules() for violation in _early_imports(path))


def _early_imports(path: Path) -> Iterator[str]:
    late = {"vl_convert", "tqdm", "obstore"}
    if name_of(path).startswith("amago"):
        late |= {"torch", "gymnasium", "duckdb", "pyarrow"}
    for node in tree(path).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found = late & {name.split(".")[0] for name in names}
        yield from (f"{name_of(path)}:{node.lineno} imports {name}" for name in sorted(found))


def test_no_file_contains_a_path_of_one_machine() -> None:
    pattern = re.compile(r"[\"'](/(?:work|home|root|Users|opt|mnt)/[^\"']*)[\"']")
    found = ((path, pattern.search(source(path))) for path in python_files(*PACKAGES, "tests"))
    check(f"{name_of(path)} contains {match[1]}" for path, match in found if match)


def test_no_class_of_the_engine_shares_its_name_with_another() -> None:
    places: dict[str, list[str]] = {}
    for path in python_files("pipelines"):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(path))
    check(f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1)


def test_every_module_has_a_docstring() -> None:
    check(name_of(path) for path in modules() if source(path).strip() and not ast.get_docstring(tree(path)))


def test_tests_mirror_the_packages() -> None:
    folders = {path.relative_to(ROOT / "pipelines").parts[0] for path in (ROOT / "pipelines").glob("*/*.py")}
    check(folder for folder in sorted(folders) if not list((ROOT / "tests" / folder).glob("test_*.py")))


@pytest.mark.system
def test_no_test_depends_on_how_busy_the_host_is() -> None:
    """A limit of wall time is either meant to be reached, and short, or so long that only a hang reaches it."""
    check(
        f"{name_of(path)}:{node.lineno} waits {seconds} s"
        for path in python_files("tests")
        if "benchmarks" not in path.parts
        for node in nodes(path)
        if isinstance(node, ast.Call | ast.Dict | ast.Compare | ast.BinOp)
        for seconds in _waits(node)
        if SHORT_WAIT < seconds < LONG_WAIT
    )


def _waits(node: ast.expr) -> Iterator[float]:
    """Yield the limits of wall time that a call, a setting, or a comparison or addition with a clock gives."""
    if isinstance(node, ast.Call):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        yield from _numbers(node.args if called in ("wait", "join", "acquire", "timeout") else [])
        yield from _numbers(each.value for each in node.keywords if _is_limit(each.arg or "", called))
    elif isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        yield from _numbers(
            value for key, value in pairs if isinstance(key, ast.Constant) and _is_limit(str(key.value))
        )
    elif isinstance(node, ast.Compare) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
        numbers = [number for number in _numbers(ast.walk(node)) if number > SHORT_WAIT]
        yield from numbers if numbers and CLOCKS.search(ast.unparse(node)) else []


def _is_limit(name: str, called: str = "") -> bool:
    return name.endswith(("timeout", "timeout_seconds")) or (called == "QueryLimits" and name == "seconds")


def _numbers(found: Iterable[ast.AST]) -> Iterator[float]:
    for node in found:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield node.value
