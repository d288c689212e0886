"""TensorBoard: event files in RUN/tensorboard, or in the directory that the argument names.

`tensorboard --logdir runs` shows all runs. Videos are animated GIFs, which its images may be.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from pipelines.formats.video_writer import as_gif
from pipelines.tracking.base import Ending, TrackedRun


class TensorBoardTracker:
    """A directory of event files; each process adds a file."""

    def __init__(self, argument: str, run: TrackedRun) -> None:
        self.place = argument or str(run.directory / "tensorboard")
        self.id = self.place[-200:]
        self._writer = EventFileWriter(self.place)
        if not run.id:
            text = f"```\n{json.dumps(run.config, indent=2, default=str)}\n```"
            shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
            tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
            metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
            value = Summary.Value(tag="config/text_summary", tensor=tensor, metadata=metadata)
            self._write(Summary(value=[value]), 0, time.time())

    def log(self, figures: Mapping[str, float], *, step: int, seconds: float) -> None:
        values = [Summary.Value(tag=name, simple_value=number) for name, number in figures.items()]
        self._write(Summary(value=values), step, seconds)

    def picture(self, name: str, path: Path, *, step: int) -> None:
        self._write_image(name, path.read_bytes(), step)

    def video(self, name: str, path: Path, *, step: int) -> None:
        self._write_image(name, path.read_bytes() if path.suffix == ".gif" else as_gif(path), step)

    def close(self, ending: Ending) -> None:
        self._writer.close()

    def _write_image(self, name: str, content: bytes, step: int) -> None:
        from PIL import Image

        width, height = Image.open(io.BytesIO(content)).size
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
        self._write(Summary(value=[Summary.Value(tag=name, image=image)]), step, time.time())

    def _write(self, summary: Any, step: int, seconds: float) -> None:
        self._writer.add_event(Event(wall_time=seconds, step=step, summary=summary))
