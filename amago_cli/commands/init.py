"""`amago init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli.options import Common, reader

_MODULE, _CLASS = "my_env", "MyEnv"  # as the files of the folder `starter` call them
_FILES = (f"{_MODULE}.py", "recipe.toml", f"test_{_MODULE}.py")


@reader
def init(
    common: Common,
    name: Annotated[
        Path, typer.Argument(metavar="NAME", help="Directory to create; the environment is named after it.")
    ],
) -> Any:
    """Create a directory with an environment of your own, a recipe and a test, ready to run and edit.

    Example: amago init mymaze
    """
    from amago_cli.render.output import Document

    written = _write_starter(name)
    lines = [
        *(f"wrote {path}" for path in written),
        f"next: cd {name} && pytest && amago run recipe.toml --minutes 2",
    ]
    return Document(text="\n".join(lines), fields={"outputs": written})


def _write_starter(directory: Path) -> list[Path]:
    """Write an environment, a recipe and a test into a new directory; the module and its class are named after it.

    UsageError if the directory is not empty, or if its name cannot be the name of a module.
    """
    import keyword
    import re
    from importlib import resources, util

    from pipelines.errors import UsageError
    from pipelines.files.atomic import explain_errors, write_atomically

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"'{directory}' already exists", hint="choose another name")
    name = directory.resolve().name
    module = re.sub(r"[-. ]", "_", name)
    if not module.isidentifier() or not module.isascii() or keyword.iskeyword(module):
        raise UsageError(
            f"'{name}' is not a valid name for a Python module", hint="use letters, digits and _, e.g. mymaze"
        )
    if util.find_spec(module) is not None:
        raise UsageError(f"a module '{module}' is already installed", hint="choose another name, e.g. mymaze")
    class_name = "".join(part[:1].upper() + part[1:] for part in module.split("_")) or module
    source = resources.files("amago_cli") / "starter"
    written = []
    with explain_errors(f"write '{directory}'"):
        directory.mkdir(parents=True, exist_ok=True)
        for file in _FILES:
            path = directory / file.replace(_MODULE, module)
            text = (source / file).read_text(encoding="utf-8")
            write_atomically(path, text.replace(_MODULE, module).replace(_CLASS, class_name))
            written.append(path)
    return written
