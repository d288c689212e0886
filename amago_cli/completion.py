"""Shell completion of recipes, environments, runs, lakes, checkpoints and settings, and the shells' scripts.

Each completer receives the part of a word that was typed and returns whole words. After a failure, as with a damaged
run, it returns none: a traceback in the middle of a command line would help nobody.
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


def script(shell: str) -> str:
    """Write the script with which `shell` completes `amago`."""
    if shell == "bash":
        return _BASH
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    return get_completion_script(prog_name="amago", complete_var=VARIABLE, shell=shell) + "\n"


def register() -> None:
    """Let the option parser answer if a shell asks for completions."""
    if VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()


def _completer(*kinds: str) -> Callable[[Any, str], list[str]]:
    """Make a callback for the option parser: words of these kinds that start as typed and need no quotes."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        with contextlib.suppress(Exception):
            words = [word for kind in kinds for word in _list_words(kind, ctx, incomplete)]
            return [word for word in words if word.startswith(incomplete) and _SAFE.fullmatch(word)]
        return []

    return complete


recipes = _completer("shipped recipe", "settings file")
shipped = _completer("shipped recipe")
profiles = _completer("profile")
sizes = _completer("size")
environments = _completer("environment")
runs = _completer("run")
bundles = _completer("bundle")
runs_and_bundles = _completer("bundle", "run")
lakes = _completer("run or lake")
runs_at_checkpoints = _completer("run at checkpoint")
policies = _completer("named policy", "run at checkpoint", "bundle")
checkpoints = _completer("checkpoint")
settings = _completer("setting")
assignments = _completer("assignment")


def _list_words(kind: str, ctx: Any, incomplete: str) -> Iterable[str]:
    """List the words of a kind, whether they start as typed or not.

    Each case imports only what it needs, since a shell waits for the answer.
    """

    def first_argument(*names: str) -> str:
        # While a later option lacks its value, the parser has not yet named the command's first argument.
        return str(next((ctx.params[name] for name in names if ctx.params.get(name)), None) or ctx.args[0])

    from pipelines.config import places

    match kind:
        case "shipped recipe":
            from pipelines.config.recipes import read_shipped_recipes

            return read_shipped_recipes()
        case "settings file":
            return _list_paths(incomplete, lambda path: path.suffix == ".toml")
        case "profile":
            from pipelines.config.recipes import find

            found: Iterable[str] = find(first_argument("recipe", "name"))[1].get("profiles", {})
            return found
        case "size":
            from pipelines.config.sizes import SIZES

            return SIZES
        case "environment":
            from pipelines.envs.suites.catalogue import ENTRIES, USER_ENTRY
            from pipelines.registry import entry_points

            envs = [entry.prefix for entry in ENTRIES if entry is not USER_ENTRY]
            envs += [point.name for point in entry_points("environment")]
            if incomplete.startswith("gym:"):
                import gymnasium

                envs += [f"gym:{name}" for name in sorted(gymnasium.registry) if ":" not in name]
            return envs
        case "run":
            return _list_paths(incomplete, places.is_run)
        case "run or lake":
            return _list_paths(incomplete, lambda path: places.is_run(path) or places.is_lake(path))
        case "bundle":
            names = [f"{places.ZOO}{name}" for name in places.list_zoo()]
            return [*names, *_list_paths(incomplete, lambda path: places.find_bundle(path) is not None)]
        case "run at checkpoint":
            run, sign, _ = incomplete.rpartition("@")
            if not sign:
                return _list_paths(incomplete, places.is_run)
            return [f"{run}@{name}" for name in _list_checkpoints(Path(run))]
        case "checkpoint":
            return _list_checkpoints(Path(first_argument("run", "source")))
        case "named policy":
            return ["random", "expert"]
        case "setting":
            from pipelines.config import reference

            return [*(setting.key for setting in reference.list_settings()), *reference.describe_tables()]
        case "assignment":  # KEY=, and then the values of a choice
            from pipelines.config import reference

            key, sign, _ = incomplete.partition("=")
            if not sign:
                return [f"{setting.key}=" for setting in reference.list_settings() if "N" not in setting.key.split(".")]
            accepted = ", ".join(setting.accepts for setting in reference.list_settings() if setting.key == key)
            values = re.findall(r'"([^"]+)"', accepted.replace("true or false", '"true" "false"'))
            return [f"{key}={value}" for value in values]
    raise AssertionError(kind)


def _list_checkpoints(run: Path) -> list[str]:
    found = [path.name for path in sorted((run / "checkpoints").iterdir()) if not path.name.startswith(".")]
    return [str(int(name)) if name.isdecimal() else name for name in found]


def _list_paths(incomplete: str, wanted: Callable[[Path], bool]) -> Iterator[str]:
    """Yield the `wanted` paths in the directory typed so far; if none is typed yet, also those in runs/."""
    typed = incomplete[: incomplete.rfind("/") + 1]
    for folder in (typed,) if typed else ("runs/", ""):
        if Path(folder or ".").is_dir():
            names = sorted(entry.name for entry in Path(folder or ".").iterdir() if not entry.name.startswith("."))
            yield from (f"{folder}{name}" for name in names if wanted(Path(folder) / name))
