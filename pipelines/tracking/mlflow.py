"""MLflow: `mlflow:EXPERIMENT`, at MLFLOW_TRACKING_URI, or else in files in ./mlruns."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.tracking.base import Ending, TrackedRun

_ENDINGS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_BATCH = 100  # parameters of a request
_LONGEST_VALUE = 500


class MlflowTracker:
    """One run of an MLflow experiment, continued by its id."""

    def __init__(self, argument: str, run: TrackedRun) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (Path.cwd() / "mlruns").as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # which MLflow 3 refuses by default
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client: Any = MlflowClient(tracking_uri=uri)
        self.id = run.id
        if self.id:
            self._client.update_run(self.id, status="RUNNING")
        else:
            name = argument or "amago"
            known = self._client.get_experiment_by_name(name)
            experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
            self.id = self._client.create_run(experiment, run_name=run.name).info.run_id
            params = [Param(_allowed(key), value[:_LONGEST_VALUE]) for key, value in _flat(run.config)]
            for start in range(0, len(params), _BATCH):
                self._client.log_batch(self.id, params=params[start : start + _BATCH])
        self.place = f"run {self.id} at {uri}"

    def log(self, figures: Mapping[str, float], *, step: int, seconds: float) -> None:
        from mlflow.entities import Metric

        at = int(seconds * 1000)
        self._client.log_batch(
            self.id, metrics=[Metric(_allowed(name), value, at, step) for name, value in figures.items()]
        )

    def picture(self, name: str, path: Path, *, step: int) -> None:
        self._client.log_artifact(self.id, str(path), "pictures")

    def video(self, name: str, path: Path, *, step: int) -> None:
        self._client.log_artifact(self.id, str(path), "videos")

    def close(self, ending: Ending) -> None:
        self._client.set_terminated(self.id, _ENDINGS[ending], int(time.time() * 1000))


def _allowed(name: str) -> str:
    """Return a name of MLflow's form: `train/q@0.9` becomes `train/q_0.9`."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)
