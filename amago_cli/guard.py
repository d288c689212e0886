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
    """Find the foreign `pipelines` folder, or the file of the current directory, that an import would find.

    None if there is neither. Nothing is imported.
    """
    if (OURS / "__init__.py").is_file():  # otherwise this is an unusual installation, and which one is ours is unknown
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec("pipelines")
            places = list(found.submodule_search_locations or ()) if found else []
            if places and all(Path(place).resolve() != OURS for place in places):
                return Path(places[0])
    here = Path.cwd()
    for name in _LIBRARIES if here.name not in ("site-packages", "dist-packages") else ():
        if name in sys.modules or not any((here / file).exists() for file in (name, f"{name}.py", f"{name}.so")):
            continue
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(name)
            if found is not None and found.origin and Path(found.origin).parent.resolve() in (here, here / name):
                return Path(found.origin)
    return None


def explain(path: Path) -> str:
    """Say which file shadows which, and what to do."""
    library = path.parent.name if path.stem == "__init__" else path.name.partition(".")[0]
    what = f"amago's own package '{OURS}'" if path.name == OURS.name else f"the library '{library}'"
    return (
        f"'{path}' shadows {what}; start amago with its console script `amago`,"
        " change to another directory, or take the folder's parent off PYTHONPATH"
    )
