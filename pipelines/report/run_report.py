"""The page about one run, or about several beside each other, once or while a run is in training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import AmagoError, is_stop, masked
from pipelines.events import Event, Listener, Notice, Progress, Waiting, duration, silent
from pipelines.files.malformed import UNREADABLE
from pipelines.report import episodes, experience, provenance, scores, training
from pipelines.report.episodes import Draw
from pipelines.report.lineage_tree import Node
from pipelines.report.markup import Child, Markup, element, join, table
from pipelines.report.page import AXES, Charts, Page
from pipelines.report.scores import format_interval
from pipelines.report.shown import ShownRun, number_runs, text
from pipelines.runs.evaluations import DEFAULT_METRIC, Evaluation, find_last_and_best
from pipelines.runs.stored import StoredRun, read_run

NAME = "report.html"
_FIRST_SECONDS = 20.0
_LEAST_SECONDS = 20.0
_PAUSE = 75  # times what the last page took
_EPISODES = 3
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
    """Make the page about `stored`.

    `sample`: number of episodes of one run that are shown, with the agent's values and frames by `draw`. `lakes`:
    whether to read lakes and lineage. A section that cannot be read says so in its place.
    """
    columns = sum(len(run.metrics.columns) for run in stored)
    points = max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS // max(columns, 1)))
    runs, charts = number_runs(stored, points=points), Charts()
    axes = [axis for axis in AXES if any(np.isfinite(run.along[axis]).any() for run in runs)]
    several = len(runs) > 1
    title = f"{len(runs)} runs" if several else runs[0].label
    return Page(
        title=f"{title} - amago report",
        head=_compare(runs) if several else _summarize(runs[0]),
        sections=[part for part in _make_sections(runs, charts, sample, lakes, draw, listener) if part[2]],
        charts=charts,
        axes=axes or ["updates"],
        runs=[(run.label, run.number, run.color) for run in runs],
        foot=f"Written by amago on {time.strftime('%Y-%m-%d %H:%M:%S %Z')}.",
    )


def _make_sections(
    runs: Sequence[ShownRun], charts: Charts, sample: int, lakes: bool, draw: Draw | None, listener: Listener
) -> Sections:
    one = runs[0] if len(runs) == 1 else None
    has_checkpoints = one is not None and (one.stored.path / "checkpoints").is_dir()
    found = []
    for run in runs[:_MOST_LAKES] if lakes else ():
        with contextlib.suppress(*_UNSHOWN):
            if (lake := experience.find_lake(run)) is not None:
                found.append((run, lake))

    def show_scores() -> Markup | None:
        collected = None
        if one and found:
            with contextlib.suppress(*_UNSHOWN):  # the section about the lake says why
                collected = experience.draw_collection(one, found[0][1], charts)
        return scores.show_scores(runs, charts, collected)

    def show_episodes() -> Markup | None:
        lake, critic, note = found[0][1], None, ""
        if one and has_checkpoints:
            from pipelines.evaluation.values import Values  # imports torch

            try:
                critic = Values(str(one.stored.path))
            except _UNSHOWN as error:
                note = f"Without the agent's values: {_explain(error)}"
        shown = episodes.show_samples(
            lake, charts, count=sample, critic=critic, draw=draw, note=note, listener=listener
        )
        about = "Episodes of the newest policy in the lake, chosen by chance."
        if critic is not None:
            about += f" Values are those of checkpoint {critic.update:,}, in reward units, for the acting discount."
        return join(element("p", about), shown)

    def show_lineage() -> Markup | None:
        if not one or not has_checkpoints:
            return None
        from pipelines.lake import lineage

        def item(node: Node) -> Markup:
            inner = element("ul", map(item, node.children)) if node.children else None
            return element("li", masked(node.text), inner)

        root = Node.of_checkpoint(lineage.trace(one.stored.path, listener=listener))
        about = "The newest checkpoint, the lakes it was trained on, who collected them, and which checkpoints acted."
        return join(element("p", about), element("ul", item(root), class_="tree"))

    def show_lakes() -> Markup | None:
        if one:
            return experience.show_lake(found[0][1], charts, listener)
        return experience.compare_lakes(found, listener)

    parts: list[tuple[str, str, Callable[[], Markup | None]]] = [
        ("groups", "Comparison", lambda: None if one else scores.show_groups(runs, charts)),
        ("scores", "Scores", show_scores),
        ("time", "Speed and time", lambda: training.show_speed(runs, charts)),
        ("metrics", "Metrics of training", lambda: training.show_metrics(runs, charts)),
    ]
    if one:
        parts.append(("videos", "Videos", lambda: episodes.show_videos(one)))
    if one and found and sample:
        parts.append(("episodes", "Episodes", show_episodes))
    if found:
        parts.append(("lake", "Lake" if one else "Lakes", show_lakes))
    parts.append(("settings", "Settings", lambda: provenance.show_settings(runs)))
    if one and lakes:
        parts.append(("lineage", "Lineage", show_lineage))
    parts += [
        ("machine", "Hardware and versions", lambda: provenance.show_machine(runs)),
        ("repeat", "Repeat it", lambda: provenance.show_commands(runs)),
    ]
    for id, title, make in parts:
        try:
            contents = make()
        except _UNSHOWN as error:
            contents = element("p", f"This part cannot be shown: {_explain(error)}", class_="warning")
        if contents:
            yield id, title, contents


def _explain(error: BaseException) -> str:
    if not isinstance(error, AmagoError):
        return masked(text(f"{type(error).__name__}: {error}"))
    return masked(text(f"{error.message}; {error.hint}" if error.hint else error.message))


def _summarize(run: ShownRun) -> Markup:
    """Show the name of a run, its state, and its figures as tiles."""
    stored, state = run.stored, run.stored.state
    began = "" if state.started is None else time.strftime("begun %Y-%m-%d %H:%M", time.localtime(state.started))
    about = [
        f"recipe {text(stored.recipe, 80)}" if stored.recipe else "",
        text(stored.env, 80),
        f"seed {stored.seed}" if stored.seed is not None else "",
        began,
        text(str(stored.path), 200),
    ]
    problems = [*stored.problems, *stored.damaged_evaluations]
    return join(
        element("h1", run.label, " ", element("span", state.status, class_=f"state {state.status}")),
        element("p", " \N{MIDDLE DOT} ".join(part for part in about if part), class_="about"),
        element("p", f"{state.status.capitalize()}: {text(state.reason)}", class_="warning") if state.reason else None,
        element("p", "; ".join(text(problem) for problem in problems[:20]), class_="warning") if problems else None,
        element("dl", *_make_tiles(run), class_="tiles"),
    )


def _make_tiles(run: ShownRun) -> Iterator[Markup]:
    def tile(name: str, value: str, more: str = "") -> Markup:
        detail = element("small", more) if more else None
        return element("div", element("dt", name), element("dd", value, detail), class_="tile")

    def where(evaluation: Evaluation) -> str:
        return text(f"update {evaluation.update:,}, {evaluation.standard}", 120)

    stored = run.stored
    found = find_last_and_best(stored.scores.final)
    if found is not None:
        last, best = found
        for name, each in (("return, last", last), *([("return, best", best)] if best is not last else [])):
            score = each.score(DEFAULT_METRIC)
            assert score is not None
            yield tile(name, f"{score.value:.4g}", f"{format_interval(score)}, {where(each)}".removeprefix(", "))
        if (success := last.score("success_mean")) is not None:
            yield tile("success, last", f"{success.value:.1%}", where(last))
    if (random := stored.random_play) is not None:
        measured = f"{random.episodes:,} episodes" if random.episodes else "known exactly"
        yield tile("return of random play", f"{random.return_mean:.4g}", measured)
    if (recorded := stored.recorded_return) is not None:
        yield tile("return in the dataset", f"{recorded:.4g}", "mean of its trajectories")
    if stored.share is not None and stored.state.status == "running":
        left = f"{duration(stored.seconds_left)} left" if stored.seconds_left is not None else ""
        yield tile("done", f"{stored.share:.0%}", left)
    if stored.env_steps is not None:
        yield tile("environment steps", f"{stored.env_steps:,}")
    if stored.updates is not None:
        yield tile("gradient updates", f"{stored.updates:,}")
    seconds = stored.metrics.columns["seconds"]
    if len(seconds) and 0 < seconds[-1] < _LONGEST_SECONDS:
        yield tile("time", duration(float(seconds[-1])), "since the first line of training")


def _compare(runs: Sequence[ShownRun]) -> Markup:
    cells: dict[str, list[Any]] = {"run": [run.label for run in runs]}
    cells |= {
        "recipe": [text(run.stored.recipe, 60) for run in runs],
        "environment": [text(run.stored.env, 60) for run in runs],
        "seed": [run.stored.seed for run in runs],
        "state": [run.stored.state.status for run in runs],
    }
    found = [find_last_and_best(run.stored.scores.final) for run in runs]
    cells["scored on"] = [pair and text(str(pair[0].standard), 60) for pair in found]
    for place, which in enumerate(("last return", "best return")):
        scores = [pair and pair[place].score(DEFAULT_METRIC) for pair in found]
        cells[f"{which}, update"] = [pair and pair[place].update for pair in found]
        cells[which] = [score and score.value for score in scores]
        cells[f"{which}, 95%"] = [score and format_interval(score) for score in scores]
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
    return join(element("h1", f"{len(runs)} runs"), *problems, shown)


class LivePage:
    """The page of a run in training: refreshed while the run makes progress, and written whole at the end.

    During training a page has neither lakes nor episodes and costs about 0.2 s. The next refresh waits for a multiple
    of what the last one took, so that pages take less than 2% of a run's time. An error in a page becomes a notice and
    never stops the run.
    """

    def __init__(self, run: Path, listener: Listener) -> None:
        self.run, self.path, self.listener = run, run / NAME, listener

    @contextlib.contextmanager
    def keep_fresh(
        self, *, clock: Callable[[], float] = time.monotonic, write: Callable[[], Any] | None = None
    ) -> Iterator[Listener]:
        """Yield a listener that also refreshes the page while there is progress."""
        due = clock() + _FIRST_SECONDS
        refresh = write or (lambda: self._write(sample=0, lakes=False))

        def forward(event: Event) -> None:
            nonlocal due
            self.listener(event)
            if isinstance(event, Progress) and (began := clock()) >= due:
                refresh()
                ended = clock()
                due = ended + max(_LEAST_SECONDS, _PAUSE * (ended - began))

        yield forward

    def write_final(self, draw: Draw | None = None) -> list[Path]:
        """Write the whole page of a run that has ended. Return its path, or an empty list if it could not be
        written."""
        return [self.path] if self._write(sample=_EPISODES, lakes=True, draw=draw) else []

    def write_stopped(self) -> None:
        """Refresh the page of a run that was stopped or failed, if it has one."""
        if self.path.exists():
            self.listener(Waiting(what=f"'{self.path}' to be written", stoppable=False))
            self._write(sample=0, lakes=False)

    def _write(self, *, sample: int, lakes: bool, draw: Draw | None = None) -> bool:
        try:
            make_page([read_run(self.run)], sample=sample, lakes=lakes, draw=draw).write(self.path)
        except Exception as error:  # a page is never worth a run, whatever goes wrong
            if is_stop(error):
                raise
            self.listener(Notice(stage="report", text=f"'{self.path}' cannot be written: {error}", level="warning"))
            return False
        return True
