"""From a batch of windows to states: timestep encoder, sequence encoder, and packing in between. B windows, T rows."""

from __future__ import annotations

from torch import Tensor

from pipelines.learning.tensors import TensorBatch
from pipelines.nets.packing import Packing
from pipelines.nets.probe import probe
from pipelines.nets.sequence import SequenceEncoder
from pipelines.nets.timestep import TimestepEncoder


def encode(timestep: TimestepEncoder, sequence: SequenceEncoder, batch: TensorBatch, *, packed: bool) -> Tensor:
    """States of all rows (B, T, D). `packed`: windows share rows of the network; states are the same."""
    sequence.require_time(batch.last_time)
    observation = timestep.augment(batch.observation) if timestep.training else batch.observation
    packing = Packing.of(batch.real_rows) if packed else None
    if packing is None:
        return sequence(timestep(observation, batch.action, batch.reward, batch.time), batch.time)
    columns = {name: packing.pack(column) for name, column in observation.items()}
    time = packing.pack(batch.time)
    tokens = timestep(columns, packing.pack(batch.action), packing.pack(batch.reward), time)
    return packing.unpack(sequence(tokens, time, packing))


def inspect(timestep: TimestepEncoder, sequence: SequenceEncoder, batch: TensorBatch) -> dict[str, Tensor]:
    """Figures of both encoders on a small part of `batch`, as 0-d tensors; nothing is learned or moved.

    Compiled encoders are called as they are written: hooks in compiled code are not seen.
    """
    training = timestep.training, sequence.training
    timestep.eval()
    sequence.eval()

    def tokens(windows: slice, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        at = (windows, rows)
        observation = {name: column[at] for name, column in batch.observation.items()}
        time = batch.time[at]
        return timestep.forward(observation, batch.action[at], batch.reward[at], time), time, batch.real_rows[at]

    try:
        return probe(timestep, sequence, tokens)
    finally:
        timestep.train(training[0])
        sequence.train(training[1])
