"""The engine that the settings name, and its use for tasks that are only to be performed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelines.config.settings import CollectSettings
from pipelines.errors import StageFailed
from pipelines.events import Event, Listener, Notice, Progress, Waiting
from pipelines.stages.ray_engine import RayEngine
from pipelines.stages.tasks import Engine, LocalEngine, RunningTask, Task

POLL_SECONDS = 0.2


def make_engine(settings: CollectSettings, count: int) -> Engine:
    """Make the engine for about `count` tasks at a time."""
    return LocalEngine(count) if settings.engine == "local" else RayEngine(settings)


def perform_all(tasks: Sequence[Task], engine: Engine, *, what: str, restarts: int, listener: Listener) -> list[Any]:
    """Perform tasks and return their results. A task whose process dies is performed again, up to `restarts` times.

    The first error of a task ends all. Progress is that of all together; `what`: a task in one word.
    """
    results: dict[int, Any] = {}
    heard: dict[int, Progress] = {}
    said: set[str] = set()
    deaths = [0] * len(tasks)

    def take(event: Event, number: int) -> None:
        if isinstance(event, Progress):
            heard[number] = event
        elif isinstance(event, Notice) and event.text not in said:
            said.add(event.text)
            listener(event)

    with engine:
        running = [engine.start(task) for task in tasks]
        while len(results) < len(tasks):
            engine.wait(POLL_SECONDS)
            for number, each in enumerate(running):
                for kind, body in each.messages():
                    if kind == "event":
                        take(body, number)
                    elif kind == "done":
                        results[number] = body
                    elif kind == "error":
                        raise body.unpack()
                if each.ended and number not in results:
                    deaths[number] += 1
                    listener(make_restart_notice(each, f"{what} {number}", again=deaths[number] <= restarts))
                    running[number] = engine.start(tasks[number])
            if heard:
                parts = list(heard.values())
                first, done = parts[0], sum(part.done for part in parts)
                total = sum(part.total or 0 for part in parts)
                listener(Progress(stage=first.stage, done=done, total=total, unit=first.unit))
            else:
                listener(Waiting(what=f"{what}s to start"))
    return [results[number] for number in range(len(tasks))]


def make_restart_notice(task: RunningTask, name: str, *, again: bool, times: str = "") -> Notice:
    """Word the warning about a task whose process has died; raise StageFailed unless the task is started `again`."""
    how = f"{name} (pid {task.pid} on {task.host}) {task.ended}"
    if not again:
        raise StageFailed(f"{how}{times}", hint="repeat the command to go on")
    return Notice(text=f"{how}; starting it again", level="warning")
