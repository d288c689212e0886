"""Which checkpoints a run has, and where; read without torch, so that a wrong name is reported at once."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pipelines.errors import InputMissing, UsageError
from pipelines.files.json import read_object

_NAME = re.compile(r"\d{6,}")


def numbers(directory: Path) -> list[int]:
    """Return update numbers of the complete checkpoints under `directory`, ascending."""
    if not directory.is_dir():
        return []
    found = (entry for entry in directory.iterdir() if _NAME.fullmatch(entry.name))
    return sorted(int(entry.name) for entry in found if (entry / "checkpoint.json").is_file())


def read_target(link: Path) -> str:
    """Return the name of the checkpoint that `link`, or the folder in its place, stands for; "" if none."""
    if link.is_symlink():
        return os.readlink(link)
    update = (read_object(link / "checkpoint.json") or {}).get("update")
    return f"{update:06d}" if isinstance(update, int) else ""


def locate(directory: Path, which: str) -> Path:
    """Return the checkpoint `which` ("latest", "best" or an update number) under `directory`. InputMissing if there is
    none, UsageError for anything else."""
    known = numbers(directory)
    if not known:
        raise InputMissing(
            f"no checkpoint in '{directory}'", hint=f"train the run first: amago train --from-lake {directory.parent}"
        )
    if which == "latest":
        return directory / f"{known[-1]:06d}"  # not by the link: a kill between rename and link loses nothing
    if which == "best":
        name = read_target(directory / "best")
        if not name or not (directory / name / "checkpoint.json").is_file():
            hint = "evaluate with evaluate.mark_best = true, or use 'latest'"
            raise InputMissing(f"no best checkpoint in '{directory}'", hint=hint)
        return directory / name
    if not which.isdigit():
        raise UsageError(f"'{which}' is not a checkpoint", hint="give latest, best or an update number")
    if int(which) not in known:
        raise InputMissing(f"no checkpoint {which} in '{directory}'", hint=f"there are: {', '.join(map(str, known))}")
    return directory / f"{int(which):06d}"
