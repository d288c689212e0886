"""Updates as CUDA graphs: all kernels of an update are launched at once, so that none waits for the host.

An update of a network of usual size is some 600 small kernels. The host takes ten microseconds or more for each, the
GPU a few. They depend on the shapes of the batch alone: they are recorded for batches of one shape, and repeated.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipelines.learning.batch import HostBatch, TensorBatch

_MOST_GRAPHS = 64  # shapes of batches; their activations share memory, and each keeps a batch and gradients
_MOST_SHAPES = 1024  # that are remembered as met
_Backward = Callable[[list[TensorBatch], list[torch.Generator]], tuple[dict[str, Tensor], list[Tensor]]]


class UpdateGraph:
    """The kernels of an update of batches of one shape: those up to the gradients' norms, and those that move the
    weights, which the host leaves out where a gradient is not finite."""

    def __init__(
        self,
        batch: HostBatch,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        pool: Any,
        backward: _Backward,
        clip: Callable[[], dict[str, Tensor]],
        move: Callable[[], None],
    ) -> None:
        # A graph reads the memory of tensors that it was not given, such as masks that are cached: they must stay.
        self._kept = [x for x in gc.get_objects() if type(x) is Tensor and x.is_cuda and x.grad_fn is None]
        assert batch.block is not None
        self._block = batch.block.to(generator.device)
        self.batch = batch.find_in(self._block)  # the one that was given last
        self._rate = torch.zeros((), device=generator.device)
        self._to_norms, self._to_weights = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self._to_norms.register_generator_state(generator)
        with torch.cuda.graph(self._to_norms, pool=pool, capture_error_mode="thread_local"):
            metrics, self._errors = backward([self.batch], [generator])
            metrics = metrics | clip()
            self._figures = torch.stack([*metrics.values()])
        self._names = [*metrics]
        options = [{name: group[name] for name in ("lr", "capturable")} for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group.update(lr=self._rate, capturable=True)
        try:
            with torch.cuda.graph(self._to_weights, pool=pool, capture_error_mode="thread_local"):
                move()
        finally:
            for group, before in zip(optimizer.param_groups, options, strict=True):
                group.update(before)

    def compute(self, batch: HostBatch) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Compute the gradients of a batch -> (metrics and norms, TD errors of its windows)."""
        assert batch.block is not None
        self._block.copy_(batch.block, non_blocking=True)
        self._to_norms.replay()
        return dict(zip(self._names, self._figures.clone().unbind(), strict=True)), [e.clone() for e in self._errors]

    def move(self, learning_rate: float) -> None:
        """Move the weights by what `compute` has found."""
        self._rate.fill_(learning_rate)
        self._to_weights.replay()


class UpdateGraphs:
    """The graphs of a learner, by the shapes of batches. A shape is recorded when it is met for the second time: the
    first update of it prepares what a recording cannot, and shapes that vary are not worth one."""

    def __init__(self, device: torch.device) -> None:
        self.failure: str | None = None  # why updates are not recorded any more
        self._graphs: dict[tuple[Any, ...], UpdateGraph] = {}
        self._met = Counter[tuple[Any, ...]]()
        self._pool: Any = None
        self.generator = torch.Generator(device)

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, batch: HostBatch, record: Callable[[Any], UpdateGraph]) -> UpdateGraph | None:
        """Find the graph for a batch; `record` makes one in a pool of memory. None: run this update as it is."""
        shapes = batch.describe()
        if shapes in self._graphs or self.failure is not None:
            return self._graphs.get(shapes)
        if len(self._met) >= _MOST_SHAPES:
            self._met.clear()
        self._met[shapes] += 1
        if self._met[shapes] < 2 or len(self._graphs) >= _MOST_GRAPHS:
            return None
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            self._graphs[shapes] = record(self._pool)
        except RuntimeError as error:  # what cannot be recorded is refused by CUDA, in many words
            self.failure = str(_find_first(error)).strip().partition("\n")[0]
            _renew_generator(self.generator.device)
            return None
        return self._graphs[shapes]


def _find_first(error: BaseException) -> BaseException:
    """Find the error that led to this one: a recording that fails does so again when it ends."""
    return error if error.__context__ is None else _find_first(error.__context__)


def _renew_generator(device: torch.device) -> None:
    """Give the global generator of a device another state: that of a failed recording waits for its end for ever."""
    for generator in torch.cuda.default_generators:
        if generator.device == device:
            generator.graphsafe_set_state(torch.Generator(device))
