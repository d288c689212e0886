"""The house's one arrow, held by reading the source: who may import whom, who may print, how long a file may be."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("amago_cli", "pipelines")
LONGEST_FILE = 400

# From the top down: a module imports from lower layers and from its own package only. Siblings share a line.
LAYERS = (
    ("amago_cli",),
    ("stages",),
    ("training", "evaluation", "report", "export"),
    ("rollout",),
    ("relabelers",),
    ("learning",),
    ("envs", "sources"),
    ("nets", "data"),
    ("lake",),
    ("config",),
    ("files",),
    ("registry",),
    ("trust",),
    ("events", "errors", "nearest"),
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}

# Who alone may import these.
ONLY_IN = {
    "duckdb": tuple(f"pipelines/lake/sql/{name}.py" for name in ("catalog", "opening", "query", "expression")),
    "boto3": ("pipelines/lake/remote/conditional.py",),
    "botocore": ("pipelines/lake/remote/conditional.py",),
    "flash_attn": ("pipelines/nets/attention.py",),
    "matplotlib": ("pipelines/report/",),
    "typer": ("amago_cli/",),
    "rich": ("amago_cli/",),
    "tqdm": ("amago_cli/",),
    "difflib": ("pipelines/nearest.py",),
    "pyarrow": ("pipelines/lake/", "pipelines/sources/", "pipelines/export/"),
}
NEVER_IN = {"pipelines/lake/": ("torch", "gymnasium"), "pipelines/data/": ("torch", "gymnasium")}


def sources(*folders: str) -> list[Path]:
    """Python files; those of a user's project to begin with are data."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if path.parent.name != "starter")


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that `path` imports, anywhere in it, and whether only for type checking."""
    tree = ast.parse(path.read_text(), str(path))
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{named(path)}:{node.lineno}: relative import"
            module = node.module or ""
            if module in PACKAGES:  # `from pipelines import errors`
                yield from ((f"{module}.{alias.name}", node in typing_only) for alias in node.names)
            else:
                yield module, node in typing_only


def layer(module: str) -> str | None:
    """`pipelines.lake.store` -> "lake"; None for what is not ours."""
    parts = module.split(".")
    if parts[0] == "amago_cli":
        return "amago_cli"
    return parts[1] if parts[0] == "pipelines" and len(parts) > 1 else None


def modules() -> list[Path]:
    return sources(*PACKAGES)


@pytest.mark.parametrize("path", modules(), ids=named)
def test_imports_point_down(path: Path) -> None:
    own = layer(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if own == "__init__":
        own = None
    assert own is None or own in LEVEL, f"{named(path)} is in no layer"
    for module, typing_only in imports(path):
        other = layer(module)
        if other is None or other == own or (own is None and typing_only):  # of the names that pipelines offers
            continue
        assert other in LEVEL, f"{named(path)} imports {module}, which is in no layer"
        assert own is not None, f"pipelines/__init__.py imports {module}"
        assert LEVEL[other] > LEVEL[own], f"{named(path)} imports {module}: {own} is not above {other}"


def test_no_modules_of_the_lake_import_each_other_in_a_circle() -> None:
    """Imports inside functions count too: a circle that is hidden there is one."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources("pipelines/lake")}
    left = {name: _imported(path) & names.keys() for name, path in names.items()}
    while free := {name for name, needed in left.items() if not needed & left.keys()}:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert not left


def _imported(path: Path) -> set[str]:
    found = {module for module, typing_only in imports(path) if not typing_only}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names if f"{node.module}" in found}
    return found


@pytest.mark.parametrize("path", modules(), ids=named)
def test_each_dependency_has_its_place(path: Path) -> None:
    name = named(path)
    for module, typing_only in imports(path):
        top = module.split(".")[0]
        allowed = ONLY_IN.get(top)
        assert typing_only or allowed is None or name.startswith(allowed), f"{name} imports {top}"
        for folder, banned in NEVER_IN.items():
            assert not (name.startswith(folder) and top in banned), f"{name} imports {top}"


@pytest.mark.parametrize("path", sources("pipelines"), ids=named)
def test_the_engine_is_silent(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("print", "input", "sys.exit", "exit", "sys.stdout.write", "sys.stderr.write"), (
                f"{named(path)}:{node.lineno} calls {called}"
            )


@pytest.mark.parametrize("path", modules(), ids=named)
def test_pictures_and_torch_are_loaded_late(path: Path) -> None:
    """What costs a second to import is imported at the top only where the module is about it."""
    late = {"matplotlib", "tqdm", "boto3", "botocore"} | (
        {"torch", "gymnasium", "duckdb", "pyarrow"} if named(path).startswith("amago") else set()
    )
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not late & {name.split(".")[0] for name in names}, f"{named(path)}:{node.lineno}"


@pytest.mark.parametrize("path", [*modules(), *sources("tests")], ids=named)
def test_a_file_fits_in_a_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST_FILE


@pytest.mark.parametrize("path", [*modules(), *sources("tests")], ids=named)
def test_no_path_of_somebody_s_machine(path: Path) -> None:
    found = re.search(r"[\"'](/(?:work|home|root|Users|opt|mnt)/[^\"']*)[\"']", path.read_text())
    assert found is None, f"{named(path)} names {found and found[1]}"


@pytest.mark.parametrize("path", modules(), ids=named)
def test_every_module_says_what_it_is(path: Path) -> None:
    source = path.read_text()
    assert not source.strip() or ast.get_docstring(ast.parse(source)), f"{named(path)} has no docstring"


def test_tests_mirror_the_packages() -> None:
    folders = {
        path.parent.relative_to(ROOT / "pipelines").parts[0]
        for path in sources("pipelines")
        if path.parent.name != "pipelines"
    }
    assert {folder for folder in folders if not list((ROOT / "tests" / folder).glob("test_*.py"))} == set()
