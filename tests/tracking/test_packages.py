"""The real packages, offline, each read back by its own library. A run is tracked, grows, and is tracked again."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.run_directory import RunDirectory
from pipelines.events import Event, Notice
from pipelines.report.frames import encode_png
from pipelines.tracking.background import track_run
from pipelines.training.metrics_log import MetricsLog

CONFIG = {"seed": 3, "env": {"name": "tmaze", "corridor": 10}, "train": {"learning_rate": 0.001}, "note": "x" * 900}
COLORS = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No login, no network, nothing outside the test's directory."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def append(directory: RunDirectory, *updates: int) -> None:
    log = MetricsLog(directory.metrics_path)
    for update in updates:
        log.append("train", update, {"loss": 1 / update, "q@0.9": update / 100})
    log.append("evaluate", updates[-1], {"return_mean": updates[-1] / 2, "return_ci95": [0.0, 9.0]})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "runs" / "maze")
    directory.path.mkdir(parents=True)
    directory.update_record(name="maze", id="00ff")
    append(directory, 25, 50)
    picture = np.zeros((20, 30, 3), dtype=np.uint8)
    picture[:, :15] = COLORS[0]
    (directory.path / "adaptation.png").write_bytes(encode_png(picture))
    return directory


def add_video(directory: RunDirectory) -> None:
    pytest.importorskip("av", reason='PyAV is not installed: pip install "amago[video]"')
    from pipelines.formats.video_writer import write_video

    frames = [np.full((32, 48, 3), color, dtype=np.uint8) for color in COLORS]
    write_video(directory.videos / "000050-0a1b2c3d-1.mp4", frames, fps=4)


def track(name: str, directory: RunDirectory) -> list[str]:
    """Track the run; return what was said, which must not be a warning."""
    heard: list[Event] = []
    with track_run([name], directory, CONFIG, heard.append):
        pass
    notices = [event for event in heard if isinstance(event, Notice)]
    assert all(notice.level == "info" for notice in notices), notices
    return [notice.text for notice in notices]


def test_tensorboard(run: RunDirectory) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    add_video(run)
    assert track("tensorboard", run) == [f"tensorboard: {run.path / 'tensorboard'}"]
    append(run, 75)
    track("tensorboard", run)
    found = reader.EventAccumulator(str(run.path / "tensorboard"), size_guidance={"images": 0, "tensors": 0})
    found.Reload()
    losses = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert losses == [(25, pytest.approx(1 / 25)), (50, pytest.approx(1 / 50)), (75, pytest.approx(1 / 75))]
    assert [event.step for event in found.Scalars("evaluate/return_ci95_high")] == [50, 75]
    entry = json.loads(run.metrics_path.read_text().splitlines()[0])
    assert found.Scalars("train/loss")[0].wall_time == pytest.approx(entry["time"], abs=1e-3)
    [picture] = found.Images("adaptation")
    shown = np.asarray(pillow.open(io.BytesIO(picture.encoded_image_string)).convert("RGB"))
    assert shown.shape == (20, 30, 3)
    assert tuple(shown[5, 5]) == COLORS[0]
    [video] = found.Images("evaluate/episode_1")
    assert video.step == 50
    with pillow.open(io.BytesIO(video.encoded_image_string)) as gif:
        assert (gif.format, gif.n_frames) == ("GIF", 3)
        for number, color in enumerate(COLORS):
            gif.seek(number)
            assert np.abs(np.asarray(gif.convert("RGB")).reshape(-1, 3).mean(0) - color).max() < 20
    [config] = found.Tensors("config/text_summary")
    assert json.loads(config.tensor_proto.string_val[0].decode().strip("`\n"))["env"] == CONFIG["env"]


def records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline run: W&B's protocol buffers in the framing of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def test_wandb(run: RunDirectory) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    pytest.importorskip("PIL.Image", reason="pillow is not installed")
    add_video(run)
    [said] = track("wandb:team/project", run)
    assert said.startswith("wandb:team/project: offline, send it by `wandb sync ")
    append(run, 75)
    track("wandb:team/project", run)
    wandb.teardown()  # as at the end of a process: its service writes the rest
    files = sorted((run.path / "wandb").glob("offline-run-*/*.wandb"))
    assert len({path.stem for path in files}) == 1  # both are the same run
    history: list[dict[str, Any]] = []
    config, media = {}, []
    for path in files:
        for record in records(path):
            if record.HasField("run"):
                assert (record.run.entity, record.run.project, record.run.display_name) == ("team", "project", "maze")
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                items = record.history.item
                history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
            if record.HasField("files"):
                media += [file.path for file in record.files.files]
    losses = [(line["update"], line["train/loss"]) for line in history if "train/loss" in line]
    assert losses == [(25, pytest.approx(1 / 25)), (50, pytest.approx(1 / 50)), (75, pytest.approx(1 / 75))]
    assert [line["update"] for line in history if "evaluate/return_mean" in line] == [50, 75]
    assert config["env"] == CONFIG["env"]
    assert [name.rpartition(".")[2] for name in sorted(media) if name.startswith("media/")] == ["png", "mp4"]


def test_wandb_without_a_login_asks_for_nothing(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(run.path))
    monkeypatch.setenv("NETRC", str(run.path / "netrc"))
    heard: list[Event] = []
    with track_run(["wandb"], run, CONFIG, heard.append):
        pass
    [warning] = [event.text for event in heard if isinstance(event, Notice) and event.level == "warning"]
    assert "there is no API key" in warning


def test_mlflow(run: RunDirectory, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    add_video(run)
    [said] = track("mlflow:mazes", run)
    append(run, 75)
    assert track("mlflow:mazes", run) == [said]
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("mazes")
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "maze"
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == [(25, 1 / 25), (50, 1 / 50), (75, 1 / 75)]
    assert found.data.metrics["train/q_0.9"] == 0.75
    assert found.data.metrics["evaluate/return_mean"] == 37.5
    assert found.data.params["env.name"] == "tmaze"
    assert found.data.params["train.learning_rate"] == "0.001"
    assert found.data.params["note"].startswith("xxx")
    kept = {each.path for folder in ("pictures", "videos") for each in client.list_artifacts(found.info.run_id, folder)}
    assert kept == {"pictures/adaptation.png", "videos/000050-0a1b2c3d-1.mp4"}


def test_trackio(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: the package chooses its directory when it is imported."""
    pytest.importorskip("trackio", reason="trackio is not installed")
    import subprocess
    import sys

    add_video(run)
    program = """
import json, sys
from pathlib import Path
from pipelines.config.run_directory import RunDirectory
from tests.tracking import test_packages as here
run = RunDirectory(Path(sys.argv[1]))
here.track("trackio:mazes", run)
here.append(run, 75)
here.track("trackio:mazes", run)
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("mazes")
logs = [SQLiteStorage.get_logs("mazes", each) for each in runs]
config = SQLiteStorage.get_run_config("mazes", runs[0])
print(json.dumps({"runs": runs, "logs": logs, "config": config}, default=str))
"""
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(run.path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["runs"] == ["maze-00ff"]
    [lines] = found["logs"]
    losses = [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]
    assert losses == [(25, pytest.approx(1 / 25)), (50, pytest.approx(1 / 50)), (75, pytest.approx(1 / 75))]
    assert [line["step"] for line in lines if "evaluate/return_mean" in line] == [50, 75]
    assert found["config"]["env"] == CONFIG["env"]
    media = [line[name] for name in ("adaptation", "evaluate/episode_1") for line in lines if name in line]
    assert [each["_type"] for each in media] == ["trackio.image", "trackio.video"]
    with contextlib.suppress(KeyError):
        assert all(list((tmp_path / "trackio").rglob(Path(each["file_path"]).name)) for each in media)
