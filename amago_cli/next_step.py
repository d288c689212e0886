"""The line after a result that suggests the next command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amago_cli.render import escaping

if TYPE_CHECKING:
    from pipelines.stages.result import Result


def next_step(result: Result) -> str | None:
    """Return the command that usually follows; None if there is no usual one, or if a remark says what to try."""
    if result.status not in ("done", "skipped") or result.remark:
        return None
    run = None if result.run is None else shlex.quote(str(result.run))
    match result.command:
        case "collect" | "relabel":
            place = run or shlex.quote(_run_or_lake(str(result.lake)))
            return f"amago train --from-lake {place}"
        case "train" if run is not None:
            return f"amago evaluate {run}{_own_environment(result.run)}"
        case "evaluate" if run is not None:
            return f"amago watch {run}{_own_environment(result.run)}"
        case "run" if run is not None:
            written = any(Path(place).name == "report.html" for place in result.outputs)
            return f"amago watch {run}{_own_environment(result.run)}" if written else f"amago report {run}"
        case "report" if run is not None:
            return f"amago export {run}"
        case "sweep" if run is not None:
            return f"amago compare {run} --to curves.png"
        case "tune" if result.outputs:
            return f"amago run {shlex.quote(str(result.outputs[0]))}"
        case "export" if result.outputs and (page := Path(result.outputs[0]) / "page.html").is_file():
            return f"python -m webbrowser {shlex.quote(str(page))}"
        case "export" if run is not None and result.outputs:
            return f"amago evaluate {shlex.quote(str(result.outputs[0]))}{_own_environment(result.run)}"
    return None


def line(outcome: Any) -> str | None:
    """Return the line to print after `outcome`; None for answers to questions."""
    from pipelines.stages.result import Result

    step = next_step(outcome) if isinstance(outcome, Result) else None
    return None if step is None else escaping.line(f"next: {step}")


def _run_or_lake(lake: str) -> str:
    from pipelines.config.places import is_run

    parent = Path(lake).parent
    return str(parent) if Path(lake).name == "lake" and is_run(parent) else lake


def _own_environment(run: Path | None) -> str:
    """Return the option that names an environment of the user's own modules, which a run may not import by itself."""
    from pipelines.config.run_directory import RunDirectory

    env = RunDirectory(run).load_document().get("env", {}) if run is not None else {}
    name = str(env.get("name", "")) if isinstance(env, dict) else ""
    return f" --env {shlex.quote(name)}" if _imports(name) else ""


def _imports(name: str) -> bool:
    """Return whether the name of an environment names a module: `mymaze:Maze`, `gym:mymodule:ID`."""
    from pipelines.envs.suites.catalogue import ENTRIES

    prefixes = tuple(entry.prefix for entry in ENTRIES if entry.prefix.endswith(":"))
    return ":" in name.removeprefix(next((each for each in prefixes if name.startswith(each)), ""))
