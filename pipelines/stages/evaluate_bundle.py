"""evaluate, of a policy bundle: the same episodes and figures as of the checkpoint that it was made from.

Nothing is written unless a directory is named: the bundle is sealed by its checksums.
"""

from __future__ import annotations

from pathlib import Path

from pipelines.config.settings import EvaluateSettings, Settings
from pipelines.events import Listener, silent
from pipelines.learning import bundle
from pipelines.stages import evaluate
from pipelines.stages.early_checks import WEIGHTS, refuse_run_settings
from pipelines.stages.result import Result


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
    refuse_run_settings(settings, directory, form=form, to=to)
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
