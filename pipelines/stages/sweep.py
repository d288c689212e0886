"""sweep: a recipe with every combination of some settings and several seeds. Each is a run, which resumes by itself."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.config.changes import may_change
from pipelines.errors import InputMissing, UsageError
from pipelines.events import Listener, Notice, Progress, silent
from pipelines.files.locks import hold_exclusively
from pipelines.runs.evaluations import DEFAULT_METRIC
from pipelines.runs.summary import Row, format_setting, summarize_runs
from pipelines.stages.compare import compare
from pipelines.stages.result import Result, Table
from pipelines.stages.run_processes import EndedRun, PlannedRun, RunProcesses, make_failure
from pipelines.stages.shared_settings import require_shared_settings

_POLL_SECONDS = 0.2
_MOST_CELLS = 10_000
_LONGEST_NAME = 120


def make_cells(varied: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """List the settings of every cell, those of one combination with all its seeds in a row.

    >>> make_cells({"train.steps": [5, 9]}, [0, 1])[:2]
    [{'train.steps': 5, 'seed': 0}, {'train.steps': 5, 'seed': 1}]
    """
    if "seed" in varied:
        raise UsageError("seed cannot be varied", hint="--seeds N runs every combination with N seeds")
    for key, values in varied.items():
        if len({repr(value) for value in values}) < len(values):
            raise UsageError(f"{key}: a value is given twice")
    cells = [
        dict(zip(varied, values, strict=True)) | {"seed": seed}
        for values in itertools.product(*varied.values())
        for seed in seeds
    ]
    if len(cells) > _MOST_CELLS:
        raise UsageError(f"a sweep of {len(cells):,} runs", hint=f"the limit is {_MOST_CELLS:,}; amago tune searches")
    return cells


def name_cells(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name a directory for each cell: `learning_rate-0.001-seed-0`.

    >>> name_cells([{"train.steps": 5, "seed": 0}])
    ['steps-5-seed-0']
    """
    keys = list(cells[0]) if cells else []
    last = [key.rpartition(".")[2] for key in keys]
    short = {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}
    names = []
    for cell in cells:
        values = [re.sub(r"[^\w.+]+", "_", format_setting(value)).strip("_.") or "none" for value in cell.values()]
        names.append("-".join(f"{short[key]}-{value}" for key, value in zip(cell, values, strict=True)))
    if len(set(names)) < len(names) or max(map(len, names), default=0) > _LONGEST_NAME:
        names = [f"{place:04d}-seed-{cell['seed']}" for place, cell in enumerate(cells)]
    return names


def run(
    planned: Sequence[PlannedRun],
    *,
    directory: Path,
    settings: Mapping[str, Any],
    varied: Sequence[str],
    command: Sequence[str],
    jobs: int = 1,
    metric: str = DEFAULT_METRIC,
    listener: Listener = silent,
) -> Result:
    """Carry out the runs that are not done, `jobs` at a time; one that fails does not stop the others.

    `settings` is the recipe's resolved document, `varied` the keys in which the runs differ. UsageError if `directory`
    has runs of other settings; StageFailed, with the result, if any failed; Locked while another process carries out a
    sweep in `directory`.
    """
    began = time.monotonic()
    logs = directory / "logs"
    with hold_exclusively(directory / ".sweep.lock", what=f"'{directory}' is in use by a sweep"):
        require_shared_settings(directory, settings, varied=varied, may_change=may_change)
        waiting = [each for each in planned if not each.is_done]
        ended: list[EndedRun] = []
        done = skipped = len(planned) - len(waiting)
        if skipped and waiting:
            listener(Notice(stage="sweep", text=f"{skipped} of {len(planned)} runs are done"))
        with RunProcesses(command, jobs=jobs, logs=logs) as processes:
            while waiting or not processes.is_idle:
                while waiting and not processes.is_full:
                    processes.start(waiting.pop(0))
                for each in processes.take_ended():
                    ended.append(each)
                    done += 1
                    listener(Notice(stage="sweep", text=f"{done}/{len(planned)} {describe_ended(each, metric)}"))
                listener(Progress(stage="sweep", done=done, total=len(planned), unit="runs"))
                time.sleep(_POLL_SECONDS)
    failed = [each for each in ended if each.code != 0]
    begun = [each.path for each in planned if each.path.is_dir()]
    rows, tables = summarize_runs(begun, metric=metric), []
    if failed:
        lines = [[each.planned.path, each.code, each.error] for each in failed]
        tables.append(Table(title="failed", columns=("run", "exit code", "error"), rows=lines))
    with contextlib.suppress(InputMissing):  # without evaluations there is nothing to compare
        tables += compare(begun, metric=metric).tables
    result = Result(
        command="sweep",
        status="failed" if failed else "done" if ended else "skipped",
        run=directory,
        metrics={"planned": len(planned), "done": skipped + len(ended) - len(failed), "failed": len(failed)}
        | {"runs": [brief(row) for row in rows]},
        tables=tables,
        seconds=time.monotonic() - began,
    )
    if failed:
        error = make_failure(failed, len(planned), logs)
        error.result = result
        raise error
    return result


def describe_ended(ended: EndedRun, metric: str) -> str:
    """Write a line about a run that has ended: its score, or what went wrong."""
    name = ended.planned.path.name
    if ended.code != 0:
        return f"{name} failed: {ended.error}"
    (row,) = summarize_runs([ended.planned.path], metric=metric)
    if row["score"] is None:
        return f"{name} done, without a {metric}"
    bounds = "" if row["score_low"] is None else f" [{row['score_low']:.4g}, {row['score_high']:.4g}]"
    return f"{name} done, {metric} {row['score']:.4g}{bounds}"


def brief(row: Row) -> Row:
    """Select the fields of a run that a result shows."""
    return {key: row[key] for key in ("run", "state", "score", "score_low", "score_high", "updates", "seed", "reason")}
