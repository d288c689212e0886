"""evaluate, of a policy bundle: the same episodes and figures as of the checkpoint that it was made from.

Nothing is written unless a directory is named: the bundle is sealed by its checksums.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines import trust
from pipelines.config.settings import EvaluateSettings, Settings, TrackSettings
from pipelines.envs.make import require_trust
from pipelines.errors import UsageError
from pipelines.events import Listener, silent
from pipelines.learning import bundle
from pipelines.stages import evaluate
from pipelines.stages.result import Result

WEIGHTS = "weights"


def run(
    settings: Settings,
    *,
    directory: Path,
    form: str = WEIGHTS,
    to: Path | None = None,
    trusted: bool = False,
    listener: Listener = silent,
) -> Result:
    """Evaluate the bundle in `directory`, acting with its weights or another `form`; report and videos are written to
    `to`. `trusted`: open a form that may contain code.

    InputMissing if it lacks the form, IntegrityError if it was altered; RequirementNotMet carries the result.
    """
    _refuse(settings.evaluate, settings.track, directory, form=form, to=to)
    found = bundle.read(directory)
    file = None
    if form != WEIGHTS:
        from pipelines.export.forms import FormFile

        file = FormFile.read(found, form, trust=trusted)

    def name(wanted: EvaluateSettings) -> str:
        return evaluate.identity(settings.env, wanted, bundle=found.record["checksum"], form=form)

    return evaluate.evaluated(
        settings,
        found,
        to=to,
        name=name,
        videos=to or Path(),
        form=file,
        listener=listener,
    )


def document(directory: Path, *, foreign: bool = False) -> dict[str, Any]:
    """Return the settings that a bundle has: its environment. `foreign`: raise InputMissing if that would import a
    module, unless the user typed its name."""
    env: Mapping[str, Any] = bundle.read_settings(directory)
    name = env.get("name")
    if foreign and isinstance(name, str):
        with trust.only(trust.typed_names() or ()):
            require_trust(name, {key: value for key, value in env.items() if key != "name"})
    return {"env": dict(env)} if env else {}


def _refuse(wanted: EvaluateSettings, track: TrackSettings, directory: Path, *, form: str, to: Path | None) -> None:
    """Raise UsageError for what only an evaluation of a run can do."""
    usual = EvaluateSettings()
    problems = [
        f"evaluate.{name}: {why}"
        for name, why in (
            ("checkpoint", "a bundle has one policy"),
            ("tasks", "a bundle has no lakes whose tasks could be chosen"),
            ("mark_best", "a bundle has no checkpoints"),
        )
        if getattr(wanted, name) != getattr(usual, name)
    ]
    if track.to:
        problems.append("track.to: only what a run writes is sent to trackers")
    if wanted.video and to is None:
        problems.append("evaluate.video: say where to write videos, with --to DIR")
    if wanted.video and form != WEIGHTS:
        problems.append("evaluate.video: videos show what the weights do, not another form")
    if to is not None and directory.resolve() in (to.resolve(), *to.resolve().parents):
        problems.append(f"'{to}' is in the bundle, which is sealed")
    if problems:
        raise UsageError("not of a bundle", hint="evaluate the run it was made from", problems=tuple(problems))
