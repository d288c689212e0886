"""The starter project of `amago init`: an environment, a recipe and a test, stored in the folder `starter`."""

from __future__ import annotations

import importlib.util
import keyword
import re
from importlib import resources
from pathlib import Path

from pipelines.errors import UsageError
from pipelines.files.atomic import explained, write_atomically

_MODULE, _CLASS = "my_env", "MyEnv"  # as the files call them
_FILES = (f"{_MODULE}.py", "recipe.toml", f"test_{_MODULE}.py")


def write(directory: Path) -> list[Path]:
    """Write the files into a new directory; the module and its class are named after it. UsageError if the directory
    is not empty or if its name cannot be the name of a module.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"'{directory}' already exists", hint="choose another name")
    module = _module(directory.resolve().name)
    source = resources.files("amago_cli") / "starter"
    written = []
    with explained(f"write '{directory}'"):
        directory.mkdir(parents=True, exist_ok=True)
        for file in _FILES:
            path = directory / file.replace(_MODULE, module)
            text = (source / file).read_text(encoding="utf-8")
            write_atomically(path, text.replace(_MODULE, module).replace(_CLASS, _class(module)))
            written.append(path)
    return written


def _module(name: str) -> str:
    """Turn a directory's name into a module's: `my-maze` -> "my_maze"."""
    module = re.sub(r"[-. ]", "_", name)
    if not module.isidentifier() or not module.isascii() or keyword.iskeyword(module):
        raise UsageError(
            f"'{name}' is not a valid name for a Python module", hint="use letters, digits and _, e.g. mymaze"
        )
    if importlib.util.find_spec(module) is not None:
        raise UsageError(f"a module '{module}' is already installed", hint="choose another name, e.g. mymaze")
    return module


def _class(module: str) -> str:
    """Turn a module's name into a class's: `my_maze` -> "MyMaze"."""
    return "".join(part[:1].upper() + part[1:] for part in module.split("_")) or module
