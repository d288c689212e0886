"""Detection of files in the current directory that would be imported in place of amago's engine or a library.

With `python -m amago_cli`, and with PYTHONPATH=., Python searches the current directory first: a folder `pipelines` or
a file `torch.py` there would be imported, that is, executed. The console script `amago` does not search it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path

OURS = Path(__file__).resolve().parent.parent / "pipelines"


# Libraries that are imported after this check.
_LIBRARIES = ("torch", "numpy", "pyarrow", "duckdb", "gymnasium", "pydantic", "safetensors", "tqdm", "tomli_w")


def shadow() -> Path | None:
    """Return the foreign `pipelines` folder or the file of the current directory that an import would find; None if
    there is neither. Imports nothing.
    """
    return _engine() or _library()


def _library() -> Path | None:
    here = Path.cwd()
    if here.name in ("site-packages", "dist-packages"):
        return None
    for name in _LIBRARIES:
        if name in sys.modules or not any((here / file).exists() for file in (name, f"{name}.py", f"{name}.so")):
            continue
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(name)
            if found is not None and found.origin and Path(found.origin).parent.resolve() in (here, here / name):
                return Path(found.origin)
    return None


def _engine() -> Path | None:
    if not (OURS / "__init__.py").is_file():
        return None  # an unusual installation: it is unknown which one is ours
    try:
        found = importlib.util.find_spec("pipelines")
    except (ImportError, ValueError):
        return None
    places = list(found.submodule_search_locations or ()) if found else []
    if not places or any(Path(place).resolve() == OURS for place in places):
        return None
    return Path(places[0])


def explain(path: Path) -> str:
    """Return the message for the user: which file shadows which, and what to do."""
    what = f"amago's own package '{OURS}'" if path.name == OURS.name else f"the library '{_named(path)}'"
    return (
        f"'{path}' shadows {what}; start amago with its console script `amago`,"
        " change to another directory, or take the folder's parent off PYTHONPATH"
    )


def _named(path: Path) -> str:
    return path.parent.name if path.stem == "__init__" else path.name.partition(".")[0]
