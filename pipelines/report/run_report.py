"""The page about one run, or about several beside each other."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipelines.errors import AmagoError, masked
from pipelines.events import Listener, duration, silent
from pipelines.files.malformed import UNREADABLE
from pipelines.report import episodes, experience, groups, provenance, scores, training, videos
from pipelines.report.episodes import Draw
from pipelines.report.lineage_tree import tree
from pipelines.report.markup import Child, Markup, element, joined, table
from pipelines.report.page import Charts, Page
from pipelines.report.scores import interval
from pipelines.report.shown import ShownRun, axes_of, shown_runs, text
from pipelines.runs.evaluations import DEFAULT_METRIC, Evaluation, last_and_best
from pipelines.runs.stored import StoredRun

_POINTS = 350_000  # of all metrics of all runs together: about 3 MB
_MOST_POINTS = 600  # of one run
_LEAST_POINTS = 40
_MOST_LAKES = 20
_LONGEST_SECONDS = 1e10
_UNSHOWN: tuple[type[Exception], ...] = (AmagoError, *UNREADABLE)

Sections = Iterator[tuple[str, str, Markup]]


def make_page(
    stored: Sequence[StoredRun],
    *,
    sample: int = 0,
    lakes: bool = True,
    draw: Draw | None = None,
    listener: Listener = silent,
) -> Page:
    """Return the page about `stored`.

    `sample`: number of episodes that are shown with the agent's values, for one run, and drawn by `draw`. `lakes`:
    whether lakes and lineage are read. What cannot be read is named in place of its section.
    """
    columns = sum(len(run.metrics.columns) for run in stored)
    points = max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS // max(columns, 1)))
    runs, charts = shown_runs(stored, points=points), Charts()
    several = len(runs) > 1
    title = f"{len(runs)} runs" if several else runs[0].label
    return Page(
        title=f"{title} - amago report",
        head=_compared(runs) if several else _summary(runs[0]),
        sections=[part for part in _sections(runs, charts, sample, lakes, draw, listener) if part[2]],
        charts=charts,
        axes=axes_of(runs),
        runs=[(run.label, run.number, run.color) for run in runs],
        foot=f"Written by amago on {time.strftime('%Y-%m-%d %H:%M:%S %Z')}.",
    )


def _sections(
    runs: Sequence[ShownRun], charts: Charts, sample: int, lakes: bool, draw: Draw | None, listener: Listener
) -> Sections:
    one = runs[0] if len(runs) == 1 else None
    found = []
    for run in runs[:_MOST_LAKES] if lakes else ():
        if (lake := _try(functools.partial(experience.lake_of, run))) is not None:
            found.append((run, lake))

    def collected() -> list[Markup]:
        return list(experience.collected(one, found[0][1], charts)) if one and found else []

    def described() -> Markup | None:
        if one:
            return experience.section(found[0][1], charts, listener) if found else None
        return experience.compared(found, listener)

    parts: list[tuple[str, str, Callable[[], Markup | None]]] = [
        ("groups", "Comparison", lambda: None if one else groups.section(runs, charts)),
        ("scores", "Scores", lambda: scores.section(runs, charts, _try(collected) or [])),
        ("time", "Speed and time", lambda: training.speed(runs, charts)),
        ("metrics", "Metrics of training", lambda: training.metrics(runs, charts)),
    ]
    if one:
        parts.append(("videos", "Videos", lambda: videos.section(one)))
    if one and found and sample:
        parts.append(("episodes", "Episodes", lambda: _episodes(one, found[0][1], charts, sample, draw, listener)))
    if found:
        parts.append(("lake", "Lake" if one else "Lakes", described))
    parts.append(("settings", "Settings", lambda: provenance.settings(runs)))
    if one and lakes:
        parts.append(("lineage", "Lineage", lambda: _lineage(one, listener)))
    parts += [
        ("machine", "Hardware and versions", lambda: provenance.machine(runs)),
        ("repeat", "Repeat it", lambda: provenance.repeat(runs)),
    ]
    for id, title, make in parts:
        try:
            contents = make()
        except _UNSHOWN as error:
            contents = element("p", f"This part cannot be shown: {_reason(error)}", class_="warning")
        if contents:
            yield id, title, contents


def _try(read: Callable[[], Any]) -> Any:
    """Return what `read` returns; None where that is impossible: the section that needs it says why, or is left out."""
    try:
        return read()
    except _UNSHOWN:
        return None


def _reason(error: BaseException) -> str:
    if not isinstance(error, AmagoError):
        return masked(text(f"{type(error).__name__}: {error}"))
    return masked(text(f"{error.message}; {error.hint}" if error.hint else error.message))


def _episodes(run: ShownRun, lake: Any, charts: Charts, count: int, draw: Draw | None, listener: Listener) -> Markup:
    critic, note = None, ""
    if (run.stored.path / "checkpoints").is_dir():
        from pipelines.evaluation.values import Values

        try:
            critic = Values(str(run.stored.path))
        except _UNSHOWN as error:
            note = f"Without the agent's values: {_reason(error)}"
    shown = episodes.section(lake, charts, count=count, critic=critic, draw=draw, note=note, listener=listener)
    about = "Episodes of the newest policy in the lake, chosen by chance."
    if critic is not None:
        about += f" Values are those of checkpoint {critic.update:,}, in reward units, for the acting discount."
    return joined(element("p", about), shown)


def _lineage(run: ShownRun, listener: Listener) -> Markup | None:
    from pipelines.lake import lineage

    if not (run.stored.path / "checkpoints").is_dir():
        return None
    root = tree(lineage.trace(run.stored.path, listener=listener))
    about = "The newest checkpoint, the lakes it was trained on, who collected them, and which checkpoints acted."
    return joined(element("p", about), provenance.lineage(root))


def _summary(run: ShownRun) -> Markup:
    """Return the name of a run, its state, and its figures as tiles."""
    stored, state = run.stored, run.stored.state
    about = [
        f"recipe {text(stored.recipe, 80)}" if stored.recipe else "",
        text(stored.env, 80),
        f"seed {stored.seed}" if stored.seed is not None else "",
        _when(state.started, "begun"),
        text(str(stored.path), 200),
    ]
    problems = [*stored.problems, *stored.damaged_evaluations]
    return joined(
        element("h1", run.label, " ", element("span", state.status, class_=f"state {state.status}")),
        element("p", " \N{MIDDLE DOT} ".join(part for part in about if part), class_="about"),
        element("p", f"{state.status.capitalize()}: {text(state.reason)}", class_="warning") if state.reason else None,
        element("p", "; ".join(text(problem) for problem in problems[:20]), class_="warning") if problems else None,
        element("dl", *_tiles(run), class_="tiles"),
    )


def _tiles(run: ShownRun) -> Iterator[Markup]:
    stored = run.stored
    found = last_and_best(stored.scores.final)
    if found is not None:
        last, best = found
        for name, each in (("return, last", last), *([("return, best", best)] if best is not last else [])):
            score = each.score(DEFAULT_METRIC)
            assert score is not None
            yield _tile(name, f"{score.value:.4g}", f"{interval(score)}, {_where(each)}".removeprefix(", "))
        if (success := last.score("success_mean")) is not None:
            yield _tile("success, last", f"{success.value:.1%}", _where(last))
    if (random := stored.random_play) is not None:
        measured = f"{random.episodes:,} episodes" if random.episodes else "known exactly"
        yield _tile("return of random play", f"{random.return_mean:.4g}", measured)
    if stored.share is not None and stored.state.status == "running":
        left = f"{duration(stored.seconds_left)} left" if stored.seconds_left is not None else ""
        yield _tile("done", f"{stored.share:.0%}", left)
    if stored.env_steps is not None:
        yield _tile("environment steps", f"{stored.env_steps:,}")
    if stored.updates is not None:
        yield _tile("gradient updates", f"{stored.updates:,}")
    seconds = stored.metrics.columns["seconds"]
    if len(seconds) and 0 < seconds[-1] < _LONGEST_SECONDS:
        yield _tile("time", duration(float(seconds[-1])), "since the first line of training")


def _where(evaluation: Evaluation) -> str:
    return text(f"update {evaluation.update:,}, {evaluation.standard}", 120)


def _tile(name: str, value: str, more: str = "") -> Markup:
    return element(
        "div", element("dt", name), element("dd", value, element("small", more) if more else None), class_="tile"
    )


def _compared(runs: Sequence[ShownRun]) -> Markup:
    """Return a table of runs and their scores."""
    cells: dict[str, list[Any]] = {"run": [run.label for run in runs]}
    cells |= {
        "recipe": [text(run.stored.recipe, 60) for run in runs],
        "environment": [text(run.stored.env, 60) for run in runs],
        "seed": [run.stored.seed for run in runs],
        "state": [run.stored.state.status for run in runs],
    }
    found = [last_and_best(run.stored.scores.final) for run in runs]
    cells["scored on"] = [pair and text(str(pair[0].standard), 60) for pair in found]
    for place, which in enumerate(("last return", "best return")):
        scores = [pair and pair[place].score(DEFAULT_METRIC) for pair in found]
        cells[f"{which}, update"] = [pair and pair[place].update for pair in found]
        cells[which] = [score and score.value for score in scores]
        cells[f"{which}, 95%"] = [score and interval(score) for score in scores]
    cells |= {
        "environment steps": [run.stored.env_steps for run in runs],
        "updates": [run.stored.updates for run in runs],
    }
    used = {name: column for name, column in cells.items() if any(cell not in (None, "") for cell in column)}
    problems: list[Child] = [
        element("p", f"{run.label}: {'; '.join(text(p) for p in run.stored.problems)}", class_="warning")
        for run in runs
        if run.stored.problems
    ]
    shown = table(list(used), zip(*used.values(), strict=True), caption="Runs and their last scores")
    return joined(element("h1", f"{len(runs)} runs"), *problems, shown)


def _when(seconds: float | None, verb: str) -> str:
    return "" if seconds is None else f"{verb} {time.strftime('%Y-%m-%d %H:%M', time.localtime(seconds))}"
