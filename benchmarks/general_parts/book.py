"""The section of docs/results.md on generality, between two marks, its profiles, and the picture of POPGym."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.general_parts import runs
from benchmarks.general_parts.scores import performance_profile
from benchmarks.general_parts.tasks import AGENTS, Task, load_tasks
from benchmarks.section import Section
from pipelines.evaluation.statistics import balance, bootstrap_ci_of_iqm, compute_iqm
from pipelines.report.charts import LIGHT, Lines, Series, add_title
from pipelines.report.charts import draw as draw_spec

SECTION = Section("general", "benchmarks/general.py book")
BEST_PEER = "best peer"
# How an agent is scored: as its users play it. Greedy play of an agent with a stochastic policy hides what it has
# learned where actions are nearly tied; that of DQN and SAC is what their papers report.
ACTS = dict.fromkeys(AGENTS, "sampled") | {"dqn": "greedy", "sac": "greedy"}
_LEVELS = np.linspace(0.0, 1.0, 51)
Scores = Mapping[str, Mapping[str, Mapping[int, float]]]  # by agent, task and seed


def normalized(rows: Sequence[Mapping[str, Any]], tasks: Mapping[str, Task], way: str = "") -> Scores:
    """Collect normalised scores by agent, task and seed, of sampled or greedy play (empty: as `ACTS` says), with the
    best peer as an agent of its own: in each task, the one of the highest mean."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        if (task := tasks.get(row["task"])) is not None:
            score = task.normalize(row[way or ACTS[row["agent"]]])
            found.setdefault(row["agent"], {}).setdefault(task.name, {})[row["seed"]] = score
    best: dict[str, dict[int, float]] = {}
    for agent in found.keys() - {"amago"}:
        for name, seeds in found[agent].items():
            if name not in best or np.mean([*seeds.values()]) > np.mean([*best[name].values()]):
                best[name] = seeds
    ordered = {agent: found[agent] for agent in AGENTS if agent in found}
    return {**ordered, BEST_PEER: best} if best else ordered


def strata(by_task: Mapping[str, Mapping[int, float]], names: Sequence[str]) -> list[np.ndarray]:
    """List the scores of each task."""
    return [np.array([*by_task[name].values()]) for name in names if name in by_task]


def section(rows: Sequence[Mapping[str, Any]], tasks: Mapping[str, Task], plot: str, games_plot: str) -> str:
    """Format the tables: aggregates of each set, every seed of every task, and POPGym's games."""
    if not rows:
        return "No results yet."
    lines, everything = [], rows
    games = [row for row in rows if is_game(row, tasks)]
    rows = [row for row in rows if not is_game(row, tasks)]
    for seconds in sorted({row["seconds"] for row in rows}, reverse=True):
        chosen = [row for row in rows if row["seconds"] == seconds]
        lines += [f"### {seconds:g} CPU seconds a run", ""]
        for kind in ("report", "tuning"):
            names = [name for name, task in tasks.items() if task.set == kind]
            if any(row["task"] in names for row in chosen):
                lines += [*_aggregates(chosen, tasks, names, kind), "", *_every_seed(chosen, tasks, names), ""]
    if rows:
        lines += [f"![Performance profiles]({plot})", ""]
    if games:
        lines += [*_games(games, tasks), "", f"![POPGym's games]({games_plot})", ""]
    codes = sorted({f"{row['version']} ({row['commit']})" for row in everything})
    return "\n".join([*lines, f"Code: {', '.join(codes)}."])


def is_game(row: Mapping[str, Any], tasks: Mapping[str, Task]) -> bool:
    """Decide whether a result is of the set popgym, which is compared with published scores."""
    return (task := tasks.get(row["task"])) is not None and task.set == "popgym"


def highest(row: Mapping[str, Any]) -> float:
    """Return the highest mean return along a run, of sampled play: the score of POPGym's paper, there called MMER."""
    return max([row["sampled"], *(point["sampled"] for point in row["curve"] if "sampled" in point)])


def _games(rows: Sequence[Mapping[str, Any]], tasks: Mapping[str, Task]) -> list[str]:
    lines = [
        "| game | random | GRU | best of 13 | of | amago, highest | amago, at the end | env steps | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    reached = dict.fromkeys(("GRU", "the best of 13"), 0)
    names = [name for name in tasks if any(row["task"] == name for row in rows)]
    for name in names:
        task, seeds = tasks[name], sorted((row for row in rows if row["task"] == name), key=lambda row: row["seed"])
        score = round(float(np.mean([highest(row) for row in seeds])), 3)
        reached["GRU"] += score >= task.gru
        reached["the best of 13"] += score >= task.best
        tops = ", ".join(f"{highest(row):.3f}" for row in seeds)
        steps, taken = (round(np.mean([row[key] for row in seeds])) for key in ("env_steps", "train_cpu_seconds"))
        published = f"{task.gru:.3f} | {task.best:.3f} | {task.source}"
        cells = (name.removeprefix("popgym-"), f"{task.random:.3f}", published, tops, _seeds(rows, name, "amago"))
        lines.append(f"| {' | '.join(cells)} | {steps:,} | {taken} |")
    counts = " and ".join(f"{each} in {count}" for each, count in reached.items())
    said = f"At least as much as the paper reports of {counts} of {len(names)} games (three digits, mean over seeds)."
    return ["### POPGym", "", said, "", *lines]


def draw_games(rows: Sequence[Mapping[str, Any]], tasks: Mapping[str, Task], path: Path) -> Path:
    """Draw a point for each agent in each game: random play, the paper's GRU, its best, and every seed of amago."""
    found = []
    for name in (name for name in tasks if any(row["task"] == name for row in rows)):
        task = tasks[name]
        scores = {"random": [task.random], "GRU, 15M steps": [task.gru], "best of 13, 15M steps": [task.best]}
        scores["amago"] = [highest(row) for row in rows if row["task"] == name]
        game = {"game": name.removeprefix("popgym-")}
        found += [{**game, "agent": agent, "return": value} for agent, values in scores.items() for value in values]
    agents = ["random", "GRU, 15M steps", "best of 13, 15M steps", "amago"]
    colours = [LIGHT.soft, LIGHT.lines[1], LIGHT.lines[4], LIGHT.lines[0]]
    shapes = {"domain": agents, "range": ["cross", "circle", "diamond", "circle"]}
    legend, axis = {"symbolType": "circle", "symbolSize": 80}, {"grid": True, "labelLimit": 220, "labelOverlap": False}
    encoding = {
        "x": {"field": "return", "type": "quantitative", "title": "mean return, the highest along the run"},
        "y": {"field": "game", "type": "nominal", "sort": None, "title": None, "axis": axis},
        "color": {"field": "agent", "scale": {"domain": agents, "range": colours}, "legend": legend},
        "shape": {"field": "agent", "scale": shapes, "legend": None},
        "size": {"condition": {"test": "datum.agent === 'amago'", "value": 110}, "value": 60},
    }
    mark = {"type": "point", "filled": True, "opacity": 0.9}
    spec = {"data": {"values": found}, "mark": mark, "encoding": encoding, "width": 460, "height": {"step": 19}}
    spec["padding"] = {"left": 20, "top": 5, "right": 30, "bottom": 5}  # a browser's letters are wider
    return draw_spec(path, add_title(spec, "", LIGHT))


def _aggregates(
    rows: Sequence[Mapping[str, Any]], tasks: Mapping[str, Task], names: Sequence[str], kind: str
) -> list[str]:
    lines = [
        f"| {kind} tasks | IQM | 95% interval | IQM sampled | IQM greedy | tasks | runs |",
        "|---|---|---|---|---|---|---|",
    ]
    ways = {way: normalized(rows, tasks, way) for way in ("", "sampled", "greedy")}
    for agent in ways[""]:
        if scores := strata(ways[""][agent], names):
            low, high = bootstrap_ci_of_iqm(scores, balanced=True)
            runs = (balance(strata(ways[way][agent], names)) for way in ("", "sampled", "greedy"))
            means = [compute_iqm(np.concatenate(each)) for each in runs]
            counts = f"{len(scores)} | {sum(map(len, scores))}"
            figures = f"{means[0]:.3f} | {low:.3f} to {high:.3f} | {means[1]:.3f} | {means[2]:.3f}"
            lines.append(f"| {agent} | {figures} | {counts} |")
    return lines


def _every_seed(rows: Sequence[Mapping[str, Any]], tasks: Mapping[str, Task], names: Sequence[str]) -> list[str]:
    present = {row["agent"] for row in rows if row["task"] in names}
    agents = [agent for agent in AGENTS if agent in present]
    lines = [f"| task | random | best | {' | '.join(agents)} |", "|---|---|---|" + "---|" * len(agents)]
    for name in names:
        found = [_seeds(rows, name, agent) for agent in agents]
        if any(found):
            lines.append(f"| {name} | {tasks[name].random:.4g} | {tasks[name].best:g} | {' | '.join(found)} |")
    return lines


def _seeds(rows: Sequence[Mapping[str, Any]], task: str, agent: str) -> str:
    """List the returns of every seed, in their order: sampled / greedy."""
    found = sorted((row for row in rows if (row["task"], row["agent"]) == (task, agent)), key=lambda row: row["seed"])
    return ", ".join(f"{row['sampled']:.4g} / {row['greedy']:.4g}" for row in found)


def draw(rows: Sequence[Mapping[str, Any]], tasks: Mapping[str, Task], path: Path) -> Path:
    """Draw each agent's performance profile on the tasks of the report, or on all where it has none."""
    names = [name for name, task in tasks.items() if task.set == "report"]
    if not any(row["task"] in names for row in rows):
        names = list(tasks)
    series = []
    for agent, by_task in normalized(rows, tasks).items():
        if scores := strata(by_task, names):
            share, low, high = performance_profile(scores, _LEVELS)
            lines = {"values": share.tolist(), "low": low.tolist(), "high": high.tolist(), "x": _LEVELS.tolist()}
            series.append(Series(name=agent, **lines))
    axes = {"x_title": "normalised score", "y_title": "share of runs above it"}
    return Lines(series=series, share=True, **axes).draw(path)


def write(source: Path, target: Path, plot: Path) -> dict[str, Any]:
    """Write the section, the plot, and that of POPGym's games beside it, and return what they count. The plot shows the
    CPU seconds of the most runs.
    """
    rows, tasks, games_plot = runs.read(source), load_tasks(), plot.with_name(f"popgym{plot.suffix}")
    SECTION.write(target, section(rows, tasks, plot.name, games_plot.name))
    games = [row for row in rows if is_game(row, tasks)]
    if others := [row for row in rows if not is_game(row, tasks)]:
        [(seconds, _)] = Counter(row["seconds"] for row in others).most_common(1)
        draw([row for row in others if row["seconds"] == seconds], tasks, plot)
    if games:
        draw_games(games, tasks, games_plot)
    return {"runs": len(rows), "tasks": len({row["task"] for row in rows}), "to": str(target)}
