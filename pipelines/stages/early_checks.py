"""Checks of what a call names, before torch is imported: a mistake is reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines import trust
from pipelines.config.places import refuse_scheme
from pipelines.config.policy_files import load_record
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import EvaluateSettings, ExportSettings, Settings
from pipelines.envs.make import require_trust
from pipelines.errors import UsageError
from pipelines.files.hub import is_on_hub
from pipelines.formats.make import find_exporter
from pipelines.lake.store import Lake

WEIGHTS = "weights"


def read_bundle_document(directory: Path, *, foreign: bool = False) -> dict[str, Any]:
    """Read the settings that a bundle has: its environment. `foreign`: raise InputMissing if that would import a
    module, unless the user typed its name."""
    env: Mapping[str, Any] = load_record(directory)["env"]
    name = env.get("name")
    if foreign and isinstance(name, str):
        with trust.only(trust.typed_names() or ()):
            require_trust(name, {key: value for key, value in env.items() if key != "name"})
    return {"env": dict(env)} if env else {}


def refuse_run_settings(settings: Settings, directory: Path, *, form: str, to: Path | None) -> None:
    """Raise UsageError for what only an evaluation of a run can do."""
    wanted, usual = settings.evaluate, EvaluateSettings()
    problems = [
        f"evaluate.{name}: {why}"
        for name, why in (
            ("checkpoint", "a bundle has one policy"),
            ("tasks", "a bundle has no lakes whose tasks could be chosen"),
            ("mark_best", "a bundle has no checkpoints"),
        )
        if getattr(wanted, name) != getattr(usual, name)
    ]
    if settings.track.to:
        problems.append("track.to: only what a run writes is sent to trackers")
    if wanted.video and to is None:
        problems.append("evaluate.video: say where to write videos, with --to DIR")
    if wanted.temperature != 1 and form != WEIGHTS:
        problems.append("evaluate.temperature: only the weights act at another temperature, not another form")
    if wanted.video and form != WEIGHTS:
        problems.append("evaluate.video: videos show what the weights do, not another form")
    if to is not None and directory.resolve() in (to.resolve(), *to.resolve().parents):
        problems.append(f"'{to}' is in the bundle, which is sealed")
    if problems:
        raise UsageError("not of a bundle", hint="evaluate the run it was made from", problems=tuple(problems))


def locate_bundle(wanted: ExportSettings, directory: Path) -> Path | str:
    """Find the directory, or the address on the Hub, to export the policy of the bundle in `directory` to. UsageError
    if it cannot be exported."""
    if not wanted.of_policy:
        find_exporter(wanted.format[0])
    if not wanted.of_policy or wanted.checkpoint != "latest":
        raise UsageError("a bundle has one policy and no trajectories", hint="give the run it was made from")
    if is_on_hub(wanted.to):
        return wanted.to
    refuse_scheme(wanted.to, what="give a directory, or hf://ORG/NAME")
    if not wanted.to or Path(wanted.to).resolve() == directory.resolve():
        raise UsageError("a bundle is exported to another directory", hint="say which: --to DIR")
    return Path(wanted.to)


def choose_folder(lake: Lake) -> Path:
    """Find the default folder of a dataset, in the lake's run. UsageError if the lake does not belong to a run."""
    if lake.run is None or not RunDirectory(lake.run).exists():
        raise UsageError(f"lake '{lake.name}' does not belong to a run", hint="say where to write: --to DIR")
    return lake.path.parent / "dataset"
