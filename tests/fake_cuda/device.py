"""A CUDA device without one: tensors that say they are on `cuda:0` while their numbers are on the host.

Every operator is computed by the CPU's kernel, after a check that its tensors are on one device, and is counted as CUDA
would run it: launches, copies in both directions, and reads for which the host waits. Numbers are those of the CPU, so
an update there must equal one here.

    with FakeCuda() as device:
        learner.step(...)
    device.launches.total(), device.syncs

Attention and GRU are replaced as a whole: on CUDA they are kernels of their own, and the operators that the CPU would
run in their place say nothing about it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, ClassVar, Self

from tests.fake_cuda import guard

guard.load()

import torch  # noqa: E402
from torch.nn.attention import varlen  # noqa: E402
from torch.nn.utils.rnn import PackedSequence  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten  # noqa: E402

CUDA = torch.device("cuda", 0)
_aten = torch.ops.aten
_INDEXING = {
    _aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default,
}  # fmt: skip
_WRITES = _INDEXING - {_aten.index.Tensor}
# Operators that take a tensor of the host by design.
_MIXED = {_aten.copy_.default, _aten._to_copy.default, _aten._pack_padded_sequence.default, _aten.set_.source_Tensor}
# Operators whose result has a shape, or is a number, that the host must wait for.
_WAITS = {
    _aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default, _aten.equal.default,
    _aten.repeat_interleave.Tensor, _aten.bincount.default, _aten.is_nonzero.default, _aten._unique2.default,
}  # fmt: skip
# Operators that launch no kernel though they are no views.
_FREE = {
    _aten.detach.default, _aten.alias.default, _aten.lift_fresh.default, _aten.set_.source_Tensor,
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default,
    _aten.new_empty.default, _aten.new_empty_strided.default, _aten._unsafe_view.default,
}  # fmt: skip


class DeviceMismatch(RuntimeError):
    """An operator was given tensors of both devices."""


class CudaTensor(torch.Tensor):
    """A tensor on `cuda:0`, whose numbers are in `inner`, a tensor of the host."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> Self:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=CUDA, requires_grad=requires_grad,
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FakeCuda.now().run(func, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):  # torch makes a tensor of it on the host, and copies that
            index = torch.tensor(index, device="cpu").to(CUDA)
        return super().__getitem__(index)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.inner.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = CudaTensor(self.inner.detach().clone(), self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self, **kwargs: Any) -> str:
        return f"CudaTensor({self.inner})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], meta: Any, size: Any, stride: Any) -> Self:
        return cls(inner["inner"])


class FakeCuda(TorchDispatchMode):
    """The device: it runs operators while the context lasts, and counts, each at the line of ours that asked for it."""

    _active: ClassVar[FakeCuda | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.own_operators = _own_operators()
        self.recording: FakeGraph | None = None
        self.reset()

    @classmethod
    def now(cls) -> FakeCuda:
        assert cls._active is not None, "a tensor of the device outlived it"
        return cls._active

    def reset(self) -> None:
        """Start counting again from zero."""
        self.launches, self.syncs = Counter[str](), Counter[str]()
        self.h2d, self.d2h = Counter[str](), Counter[str]()

    def __enter__(self) -> Self:
        FakeCuda._active = self
        torch._C._ensureCUDADeviceGuardSet()
        self._one_thread = torch.autograd.grad_mode.set_multithreading_enabled(False)  # the mode is of this thread
        self._one_thread.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._one_thread.__exit__(*error)
        FakeCuda._active = None

    @contextlib.contextmanager
    def _nested(self) -> Iterator[None]:
        """Run operators of Python code that an operator itself is made of."""
        TorchDispatchMode.__enter__(self)
        try:
            yield
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operator, wherever its tensors are."""
        if func in self.own_operators:
            with self._nested():
                return self.own_operators[func](*args, **kwargs)
        given, spec = tree_flatten((args, kwargs))
        there = [x for x in given if isinstance(x, CudaTensor)]
        target = kwargs.get("device")
        target = None if target is None else torch.device(target).type
        if not there and target != "cuda":
            return self._compute(func, args, kwargs)
        here = [x for x in given if isinstance(x, torch.Tensor) and not isinstance(x, CudaTensor)]
        is_there = target == "cuda" or (bool(there) and target != "cpu")
        if func is _aten.copy_.default:
            is_there = isinstance(args[0], CudaTensor)
        self._check_and_count(func, args, there, here, target, is_there)

        def to_host(x: Any) -> Any:
            if isinstance(x, CudaTensor):
                return x.inner
            return torch.device("cpu") if isinstance(x, torch.device) and x.type == "cuda" else x

        host_args, host_kwargs = tree_unflatten([to_host(x) for x in given], spec)
        if host_kwargs.get("device") is not None:
            host_kwargs["device"] = torch.device("cpu")
        if "pin_memory" in host_kwargs:
            host_kwargs["pin_memory"] = False
        if self.recording is not None and (target == "cpu" or (here and func is _aten.copy_.default)):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func} at {_place()}")
        out = self._compute(func, host_args, host_kwargs)
        if func is _aten._local_scalar_dense.default:
            return out
        if func is _aten.copy_.default:
            return args[0]
        if not is_there:
            return out
        if func is _aten._pack_padded_sequence.default:
            return CudaTensor(out[0]), out[1]  # sizes stay on the host
        out = tree_map_only(torch.Tensor, lambda x: x if isinstance(x, CudaTensor) else CudaTensor(x), out)
        if func._schema.is_mutable or func.is_view:
            return return_and_correct_aliasing(func, args, kwargs, out)
        return out

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs) if self.recording is None else self.recording.record(func, args, kwargs)

    def _check_and_count(self, func: Any, args: Any, there: Any, here: Any, target: str | None, is_there: bool) -> None:
        if func is _aten.copy_.default or func is _aten._to_copy.default:
            source = args[1] if func is _aten.copy_.default else args[0]
            if is_there and not isinstance(source, CudaTensor):
                self.count(self.h2d)
            elif isinstance(source, CudaTensor) and not is_there:
                self.count(self.d2h)
                self.count(self.syncs)
        elif there and any(x.dim() for x in here):  # a number of the host goes as an argument of the kernel
            operands = [args[0], args[2]] if func in _WRITES else [args[0]]
            if func in _INDEXING and not any(x is operand for x in here for operand in operands):
                for _ in here:
                    self.count(self.h2d)
            elif func not in _MIXED:
                shapes = [(tuple(x.shape), x.device.type) for x in (*there, *here)]
                raise DeviceMismatch(f"{func} at {_place()}: {shapes}")
        if func in _WAITS or (func in _INDEXING and self._waits_for_mask(func, args)):
            self.count(self.syncs)
        if is_there and not func.is_view and func not in _FREE:
            self.launches[f"{func} {_place()}"] += _count_kernels(func, args)

    @staticmethod
    def _waits_for_mask(func: Any, args: Any) -> bool:
        """Return whether indexing must count the true places of a mask: all does, except filling with one number."""
        is_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        return is_mask and not (func in _WRITES and args[2].numel() == 1 and len(args[1]) == 1)

    def count(self, counter: Counter[str]) -> None:
        counter[_place()] += 1

    def launch(self, kernel: str, times: int = 1) -> None:
        self.launches[f"{kernel} {_place()}"] += times


class FakeGraph:
    """A CUDA graph: operators that are recorded, without effect, and repeated on the same memory."""

    def __init__(self) -> None:
        self._operators: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def register_generator_state(self, generator: torch.Generator) -> None:
        assert generator.device.type == "cuda"

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operator, whose effects `record_graph` takes back."""
        if func in _WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func} at {_place()}")
        given, _ = tree_flatten((args, kwargs))
        if func._schema.is_mutable:
            for tensor in given:
                if isinstance(tensor, torch.Tensor):
                    memory = tensor.untyped_storage()
                    if memory.data_ptr() not in self._before:
                        self._before[memory.data_ptr()] = (memory, memory.clone())  # type: ignore[assignment]
        # Of the tensors' memory, not of these objects, which an operator in place may transpose.
        same = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        out = func(*args, **kwargs)
        self._operators.append((func, *same, tree_map_only(torch.Tensor, torch.Tensor.detach, out)))
        return out

    def undo(self) -> None:
        for memory, before in self._before.values():
            memory.copy_(before)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        device = FakeCuda.now()
        device.launch("graph")
        for func, args, kwargs, out in self._operators:
            if func.is_view:
                continue
            made = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for ours, new in zip(tree_flatten(out)[0], tree_flatten(made)[0], strict=True):
                    if isinstance(ours, torch.Tensor):
                        ours.copy_(new)


@contextlib.contextmanager
def record_graph(graph: FakeGraph, **_: Any) -> Iterator[None]:
    """Stand in for `torch.cuda.graph`."""
    device = FakeCuda.now()
    device.recording = graph
    try:
        yield
    finally:
        device.recording = None
        with torch.no_grad():
            graph.undo()


def _count_kernels(func: Any, args: Any) -> int:
    """Count the kernels of an operator: of one on lists, one if the lists agree in shapes, else one for each place."""
    lists = [each for each in args if isinstance(each, list) and each and isinstance(each[0], torch.Tensor)]
    if "_foreach" not in str(func) or all([x.shape for x in each] == [x.shape for x in lists[0]] for each in lists):
        return 1
    return len(lists[0])


def _place() -> str:
    """Return the line of the packages that is being run, or of the tests."""
    frame: Any = sys._getframe(2)
    outside = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/pipelines/" in name:
            return f"{name.rpartition('/pipelines/')[2]}:{frame.f_lineno}"
        if not outside and "/torch/" not in name and "/tests/fake_cuda/device.py" not in name:
            outside = f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return outside


def _own_operators() -> dict[Any, Callable[..., Any]]:
    """Return the operators of this package: Python code, which runs on the device."""
    from pipelines.nets import mamba, scan, timestep

    made = (scan._scan, scan._scan_back, mamba._scan_chunks, mamba._scan_chunks_back, timestep.last_state)
    return {each._opoverload: each._init_fn for each in made}


def on_host(x: Any) -> Any:
    return x.inner if isinstance(x, CudaTensor) else x


class _Kernel(torch.autograd.Function):
    """A differentiable kernel: `compute` on the host, and its gradients by torch's autograd."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], name: str, backward_launches: int, *given: Any) -> Any:
        FakeCuda.now().launch(name)
        ctx.compute, ctx.name, ctx.launches = compute, name, backward_launches
        ctx.save_for_backward(*given)
        out = compute(*map(on_host, given))
        return tuple(CudaTensor(x) for x in out) if isinstance(out, tuple) else CudaTensor(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        FakeCuda.now().launch(f"{ctx.name}_backward", ctx.launches)
        with torch.enable_grad():
            inputs = [None if x is None else on_host(x).detach().requires_grad_() for x in ctx.saved_tensors]
            out = ctx.compute(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        needed = [x for x in inputs if x is not None]
        found = iter(torch.autograd.grad(outs, needed, [on_host(grad) for grad in grads], allow_unused=True))
        gradients = [None if x is None else next(found) for x in inputs]
        return None, None, None, *(None if grad is None else CudaTensor(grad.contiguous()) for grad in gradients)


def kernel(name: str, compute: Callable[..., Any], *given: torch.Tensor | None, backward_launches: int = 1) -> Any:
    """Run `compute` of tensors as one kernel of the device."""
    assert all(x is None or isinstance(x, CudaTensor) for x in given), f"{name}: a tensor is not on the device"
    run: Any = _Kernel.apply
    return run(compute, name, backward_launches, *given)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None, *, scale: float, cap: float = 0.0
) -> torch.Tensor:
    """Compute attention (..., T, D) in float32 and round it as a kernel does."""
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if cap:
        scores = cap * (scores / cap).tanh()
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def host_ends(ends: Any, longest: int, tokens: int) -> list[int]:
    """Return where documents begin and the last ends, as a kernel would read them."""
    assert ends.dtype == torch.int32, "ends of documents must be int32"
    assert isinstance(ends, CudaTensor)
    assert ends.is_contiguous()
    found: list[int] = ends.inner.tolist()
    assert isinstance(longest, int)
    assert found[-1] == tokens
    assert max(b - a for a, b in pairwise(found)) <= longest
    return found


def documents(
    q: Any, k: Any, v: Any, ends: list[int], *, scale: float | None, window: tuple[int, int], cap: float = 0.0
) -> Any:
    """Compute attention within documents of tokens (N, H, D): query i sees keys from i - window[0] to i + window[1], of
    which -1 is no limit."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def compute(q: Any, k: Any, v: Any) -> Any:
        out = []
        for first, last in pairwise(ends):
            place = torch.arange(last - first, device="cpu")
            ahead = place - place[:, None]
            left, right = (limit if limit >= 0 else last for limit in window)
            part = (x[first:last].transpose(0, 1) for x in (q, k, v))
            out.append(attention(*part, (ahead >= -left) & (ahead <= right), scale=factor, cap=cap).transpose(0, 1))
        return torch.cat(out)

    return kernel("documents", compute, q, k, v)


def _varlen(real: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own attention over documents, with the arguments of the torch installed."""
    signature = inspect.signature(real)

    def varlen_attn(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        q, k, v = given["query"], given["key"], given["value"]
        assert q.dtype in (torch.float16, torch.bfloat16)
        assert q.shape[-1] % 8 == 0
        assert q.shape[-1] <= 256
        ends = host_ends(given["cu_seq_q"], given["max_q"], len(q))
        return documents(q, k, v, ends, scale=given["scale"], window=given["window_size"])

    varlen_attn.__signature__ = signature  # type: ignore[attr-defined]
    return varlen_attn


def _sdpa(real: Callable[..., Any]) -> Callable[..., Any]:
    def scaled_dot_product_attention(
        q: Any,
        k: Any,
        v: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: Any = None,
    ) -> Any:
        if not isinstance(q, CudaTensor):
            return real(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
        seen = on_host(attn_mask)
        if attn_mask is not None:
            assert isinstance(attn_mask, CudaTensor), "the mask is not on the device"
        if is_causal:
            seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device="cpu").tril()

        def compute(q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, seen, scale=scale or q.shape[-1] ** -0.5)

        return kernel("sdpa", compute, q, k, v, backward_launches=3)

    return scaled_dot_product_attention


def _gru(real: Callable[..., Any]) -> Callable[..., Any]:
    """cuDNN's kernels: counted as one a layer forward, and two backward."""

    def forward(self: torch.nn.GRU, x: Any, hx: Any = None) -> Any:
        weights = [getattr(self, name) for names in self._all_weights for name in names]
        if not isinstance(weights[0], CudaTensor):
            return real(self, x, hx)
        is_packed = isinstance(x, PackedSequence)
        sizes = x.batch_sizes if is_packed else None
        assert not isinstance(sizes, CudaTensor), "sizes of a packed sequence belong to the host"
        if is_packed and hx is not None and x.sorted_indices is not None:
            hx = hx.index_select(1, x.sorted_indices)

        def compute(data: Any, hx: Any, *weights: Any) -> Any:
            batch = int(sizes[0]) if sizes is not None else data.shape[0 if self.batch_first else 1]
            start = data.new_zeros(self.num_layers, batch, self.hidden_size) if hx is None else hx
            if sizes is not None:
                return torch._VF.gru(data, sizes, start, weights, True, self.num_layers, 0.0, False, False)
            return torch._VF.gru(data, start, weights, True, self.num_layers, 0.0, False, False, self.batch_first)

        out, last = kernel(
            "gru", compute, x.data if is_packed else x, hx, *weights, backward_launches=2 * self.num_layers
        )
        if not is_packed:
            return out, last
        if x.unsorted_indices is not None:
            last = last.index_select(1, x.unsorted_indices)
        return PackedSequence(out, x.batch_sizes, x.sorted_indices, x.unsorted_indices), last

    return forward


class _Generator(torch.Generator):
    """A generator that says it is on the device it was made for; its numbers are the CPU's."""

    _device: torch.device

    def __new__(cls, device: Any = "cpu") -> Self:
        made = super().__new__(cls, "cpu")
        made._device = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device


def pretend() -> None:
    """Let torch report one GPU of the Hopper generation in this process, for good."""
    facts: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_bf16_supported": True,
        "get_device_name": "no GPU", "get_device_capability": (9, 0), "max_memory_allocated": 1 << 20,
        "set_device": None, "synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None,
        "manual_seed": None, "manual_seed_all": None, "_lazy_init": None,
    }  # fmt: skip
    for name, fact in facts.items():
        setattr(torch.cuda, name, lambda *args, fact=fact, **kwargs: fact)
    torch.cuda.CUDAGraph = FakeGraph  # type: ignore[assignment, misc]
    torch.cuda.graph = record_graph  # type: ignore[assignment, misc]
    torch.cuda.graph_pool_handle = lambda: None  # type: ignore[assignment, return-value]
    move = torch.nn.Module._apply

    def moved(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Replace tensors of one class by tensors of the other in place, as parameters are known to optimisers."""
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return move(module, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    torch.nn.Module._apply = moved  # type: ignore[method-assign]
    torch.nn.functional.scaled_dot_product_attention = _sdpa(torch.nn.functional.scaled_dot_product_attention)
    torch.nn.GRU.forward = _gru(torch.nn.GRU.forward)  # type: ignore[method-assign]
    varlen.varlen_attn = _varlen(varlen.varlen_attn)
    torch.Generator = _Generator  # type: ignore[misc]
    make = torch.tensor

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "cuda":
            return make(*args, **kwargs) if device is None else make(*args, device=device, **kwargs)
        return make(*args, device="cpu", **kwargs).to(CUDA)  # made on the host, then copied

    torch.tensor = tensor
    empty = torch.empty

    def pageable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)  # memory of the host is page-locked by a driver

    torch.empty = pageable
