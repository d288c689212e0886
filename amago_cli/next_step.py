"""The line after a result that suggests the next command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any


def suggest_command(result: Any) -> str | None:
    """Suggest the command that usually follows the outcome of one: None for an answer to a question, if there is no
    usual one, or if a remark says what to try."""
    from pipelines.stages.result import Result

    if not isinstance(result, Result) or result.status not in ("done", "skipped") or result.remark:
        return None
    run = None if result.run is None else shlex.quote(str(result.run))
    match result.command:
        case "collect" | "relabel":
            from pipelines.config.places import is_run

            lake = Path(str(result.lake))  # that of a run is called by the run
            place = str(lake.parent) if lake.name == "lake" and is_run(lake.parent) else str(result.lake)
            return f"amago train --from-lake {run or shlex.quote(place)}"
        case "train" if run is not None:
            return f"amago evaluate {run}{_env_option(result.run)}"
        case "evaluate" if run is not None:
            return f"amago watch {run}{_env_option(result.run)}"
        case "run" if run is not None:
            written = any(Path(place).name == "report.html" for place in result.outputs)
            return f"amago watch {run}{_env_option(result.run)}" if written else f"amago report {run}"
        case "report" if run is not None:
            return f"amago export {run}"
        case "sweep" if run is not None:
            return f"amago compare {run} --to curves.png"
        case "tune" if result.outputs:
            return f"amago run {shlex.quote(str(result.outputs[0]))}"
        case "export" if result.outputs and (page := Path(result.outputs[0]) / "page.html").is_file():
            return f"python -m webbrowser {shlex.quote(str(page))}"
        case "export" if run is not None and result.outputs:
            return f"amago evaluate {shlex.quote(str(result.outputs[0]))}{_env_option(result.run)}"
    return None


def _env_option(run: Path | None) -> str:
    """Write the option that names an environment of the user's own modules, such as `mymaze:Maze` or `gym:mymodule:ID`.

    A run may not import these by itself: only names that a user types are trusted.
    """
    from pipelines.config.run_directory import RunDirectory
    from pipelines.envs.suites.catalogue import ENTRIES

    env = RunDirectory(run).load_document().get("env", {}) if run is not None else {}
    name = str(env.get("name", "")) if isinstance(env, dict) else ""
    prefixes = [entry.prefix for entry in ENTRIES if entry.prefix.endswith(":") and name.startswith(entry.prefix)]
    return f" --env {shlex.quote(name)}" if ":" in name.removeprefix((prefixes or [""])[0]) else ""
