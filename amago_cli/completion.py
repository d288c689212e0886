"""Shell completion of recipes, environments, runs, lakes, checkpoints and settings, and the shells' scripts.

Each function receives the part of a word that was typed and returns whole words; after a failure, as with a damaged
run, it returns none.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

VARIABLE = "_AMAGO_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
# Bash also splits words at : and =, so the line is split again, and the part before them is removed.
_BASH = """\
_amago_completion() {
    local line="${COMP_LINE:0:$COMP_POINT}" words current stem
    read -ra words <<< "$line"
    [[ "$line" == *" " ]] && words+=("")
    current="${words[${#words[@]}-1]}"
    local IFS=$'\\n'
    COMPREPLY=($(env COMP_WORDS="$line" COMP_CWORD=$((${#words[@]}-1)) _AMAGO_COMPLETE=complete_bash amago 2>/dev/null))
    stem="${current%"${current##*[:=]}"}"
    [[ -n "$stem" ]] && COMPREPLY=("${COMPREPLY[@]#"$stem"}")
    [[ "${COMPREPLY[0]}" == *[=/:@-] ]] && compopt -o nospace
}
complete -o default -F _amago_completion amago
"""
# A name with other characters would need quoting, which differs between shells.
_SAFE = re.compile(r"[\w./@:+=,%-]+")
_Words = Callable[[Any, str], Iterable[str]]


def script(shell: str) -> str:
    """Return the script with which `shell` completes `amago`."""
    if shell == "bash":
        return _BASH
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    return get_completion_script(prog_name="amago", complete_var=VARIABLE, shell=shell) + "\n"


def register() -> None:
    """Let the option parser answer if a shell requests completions."""
    if VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()


def _completes(words: _Words) -> Callable[[Any, str], list[str]]:
    """Return a callback for the option parser: those of `words` that start as typed and need no quotes."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        with contextlib.suppress(Exception):
            return [word for word in words(ctx, incomplete) if word.startswith(incomplete) and _SAFE.fullmatch(word)]
        return []

    return complete


@_completes
def recipes(ctx: Any, incomplete: str) -> Iterable[str]:
    from pipelines.config.recipes import shipped_recipes

    return [*shipped_recipes(), *_paths(incomplete, lambda path: path.suffix == ".toml")]


@_completes
def shipped(ctx: Any, incomplete: str) -> Iterable[str]:
    from pipelines.config.recipes import shipped_recipes

    return shipped_recipes()


@_completes
def profiles(ctx: Any, incomplete: str) -> Iterable[str]:
    from pipelines.config.recipes import find

    return find(_argument(ctx, "recipe", "name"))[1].get("profiles", {})


@_completes
def sizes(ctx: Any, incomplete: str) -> Iterable[str]:
    from pipelines.config.sizes import SIZES

    return SIZES


@_completes
def environments(ctx: Any, incomplete: str) -> Iterable[str]:
    from pipelines.envs.suites.catalogue import ENTRIES, USER_ENTRY
    from pipelines.registry import entry_points

    names = [entry.prefix for entry in ENTRIES if entry is not USER_ENTRY]
    names += [point.name for point in entry_points("environment")]
    if incomplete.startswith("gym:"):
        import gymnasium

        names += [f"gym:{name}" for name in sorted(gymnasium.registry) if ":" not in name]
    return names


@_completes
def runs(ctx: Any, incomplete: str) -> Iterable[str]:
    return _runs(incomplete)


@_completes
def runs_and_bundles(ctx: Any, incomplete: str) -> Iterable[str]:
    from pipelines.config.places import is_run

    return [*_bundles(incomplete), *_paths(incomplete, is_run)]


@_completes
def bundles(ctx: Any, incomplete: str) -> Iterable[str]:
    return _bundles(incomplete)


@_completes
def lakes(ctx: Any, incomplete: str) -> Iterable[str]:
    from pipelines.config.places import is_lake, is_run

    return _paths(incomplete, lambda path: is_run(path) or is_lake(path))


@_completes
def runs_at_checkpoints(ctx: Any, incomplete: str) -> Iterable[str]:
    return _runs_at_checkpoints(incomplete)


@_completes
def policies(ctx: Any, incomplete: str) -> Iterable[str]:
    return ["random", "expert", *_runs_at_checkpoints(incomplete), *_bundles(incomplete)]


@_completes
def checkpoints(ctx: Any, incomplete: str) -> Iterable[str]:
    return _checkpoints(Path(_argument(ctx, "run", "source")))


@_completes
def settings(ctx: Any, incomplete: str) -> Iterable[str]:
    from pipelines.config.reference import settings, tables

    return [*(setting.key for setting in settings()), *tables()]


@_completes
def assignments(ctx: Any, incomplete: str) -> Iterable[str]:
    """Complete `KEY=`, then the values of a choice."""
    from pipelines.config.reference import settings

    key, sign, _ = incomplete.partition("=")
    if not sign:
        return [f"{setting.key}=" for setting in settings() if "N" not in setting.key.split(".")]
    accepted = ", ".join(setting.accepts for setting in settings() if setting.key == key)
    values = re.findall(r'"([^"]+)"', accepted.replace("true or false", '"true" "false"'))
    return [f"{key}={value}" for value in values]


def _argument(ctx: Any, *names: str) -> str:
    """Return the command's first argument; while a later option lacks its value, the parser has not named it."""
    return str(next((ctx.params[name] for name in names if ctx.params.get(name)), None) or ctx.args[0])


def _runs_at_checkpoints(incomplete: str) -> Iterator[str]:
    run, sign, _ = incomplete.rpartition("@")
    if not sign:
        yield from _runs(incomplete)
        return
    yield from (f"{run}@{name}" for name in _checkpoints(Path(run)))


def _checkpoints(run: Path) -> list[str]:
    found = [path.name for path in sorted((run / "checkpoints").iterdir()) if not path.name.startswith(".")]
    return [str(int(name)) if name.isdecimal() else name for name in found]


def _runs(incomplete: str) -> Iterator[str]:
    from pipelines.config.places import is_run

    return _paths(incomplete, is_run)


def _bundles(incomplete: str) -> Iterator[str]:
    from pipelines.config import zoo
    from pipelines.config.places import bundle_directory

    yield from (f"{zoo.PREFIX}{name}" for name in zoo.names() if f"{zoo.PREFIX}{name}".startswith(incomplete))
    yield from _paths(incomplete, lambda path: bundle_directory(path) is not None)


def _paths(incomplete: str, wanted: Callable[[Path], bool]) -> Iterator[str]:
    """Yield the `wanted` paths in the directory typed so far; if none is typed yet, also those in runs/."""
    typed = incomplete[: incomplete.rfind("/") + 1]
    for folder in (typed,) if typed else ("runs/", ""):
        if Path(folder or ".").is_dir():
            names = sorted(entry.name for entry in Path(folder or ".").iterdir() if not entry.name.startswith("."))
            yield from (f"{folder}{name}" for name in names if wanted(Path(folder) / name))
