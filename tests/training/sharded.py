"""A learner that trains as one of several ranks: `python -m torch.distributed.run ... -m tests.training.sharded OUT
SETTINGS`. It writes figures of its updates and of its memory, and a checkpoint."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.config.host import get_rank, is_main
from pipelines.config.policy_files import list_checkpoints
from pipelines.learning import checkpoint as checkpoints
from pipelines.nets import ranks
from pipelines.training.learner import Learner
from tests.stages.recipes import tiny
from tests.training.test_learner import SPACES, batch

BLOCKS = {"d_model": 32, "num_layers": 6, "num_heads": 4, "d_ff": 128, "dropout": 0.05}
TRAIN = {"batch_size": 24, "grad_accumulation": 6, "log_every": 2, "grad_clip": 0.5, "ema_decay": 0.9}


def updates(place: Path, number: int, train: dict[str, Any], **sequence: Any) -> dict[str, Any]:
    """Continue from the checkpoint under `place`, if there is one, for `number` updates, and write another."""
    settings = tiny(train=TRAIN | train, agent={"sequence": sequence or BLOCKS})
    gc.collect()
    before = _storages()  # of other tests of this process; held, so that their addresses are not used again
    learner = Learner(SPACES, settings.agent, settings.train, seed=3)
    if list_checkpoints(place):
        learner.restore(checkpoints.load(place))
    figures = []
    for update in range(learner.update, learner.update + number):
        places = iter(learner.micro_batches)
        found = learner.step(lambda size, update=update, places=places: _windows(update, next(places), size))
        figures.append({name: float(value) for name, value in found.items()})
    del found
    gc.collect()
    live = sum(each.nbytes() for address, each in _storages().items() if address not in before)
    if is_main():
        learner.save(place, {})
    else:
        learner.state()
    rows = {name: shard.rows.numel() for name, shard in learner.shards.of.items()}
    return {
        "figures": figures,
        "bytes": live,
        "numel": sum(each.numel() for each in learner.parameters),
        "all": sum(each.numel() for each in learner.agent.trainable_parameters().values()),
        "rows": rows,
        "state": sum(each["exp_avg"].numel() for each in learner.optimizer.state.values()),
    }


def _windows(update: int, number: int, size: int) -> Any:
    return batch(np.random.default_rng((update, number)), size=size)


def _storages() -> dict[int, torch.UntypedStorage]:
    """Find the memory of all tensors, by address."""
    tensors = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
    return {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}


if __name__ == "__main__":
    out, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
    ranks.join(torch.device("cpu"), timeout_seconds=600)
    result = updates(out / "checkpoints", **wanted)
    (out / f"{get_rank()}.json").write_text(json.dumps(result))
    ranks.leave()
