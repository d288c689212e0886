"""Every backend against attention as written on paper."""

import gc
import inspect
import math
from itertools import pairwise

import pytest
import torch

from pipelines.nets import attention
from pipelines.nets.attention import BACKENDS, AttentionWindow, attend, attend_cached, choose, dense, find_obstacle
from pipelines.nets.packing import Packing
from tests.tiers import some

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIGHTS = [
    AttentionWindow(),
    AttentionWindow(size=1),
    AttentionWindow(size=3),
    AttentionWindow(size=7),
    AttentionWindow(size=20),
    AttentionWindow(size=3, sink=1),
    AttentionWindow(size=2, sink=9),
    AttentionWindow(logit_clip=0.7),
    AttentionWindow(size=4, sink=2, logit_clip=0.7),
]
LENGTHS = (7, 3, 1, 4, 2, 2)


def qkv(batch=3, heads=2, length=7, size=4, **kind):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, batch, heads, length, size, generator=generator).to(**kind).requires_grad_()


def literal(q, k, v, window, documents):
    """One query after the other, one key after the other; (T, Dh) and the document of each place."""
    out = torch.zeros_like(v)
    for i in range(len(q)):
        first = documents.index(documents[i])
        scores, seen = [], []
        for j in range(i + 1):
            near = window.size is None or i - j < window.size or j - first < window.sink
            if documents[j] == documents[i] and near:
                score = (q[i] @ k[j]).item() / math.sqrt(q.shape[-1])
                scores.append(
                    score if window.logit_clip is None else window.logit_clip * math.tanh(score / window.logit_clip)
                )
                seen.append(j)
        out[i] = sum(s * v[j] for s, j in zip(torch.tensor(scores).softmax(0), seen, strict=True))
    return out


@pytest.mark.parametrize("window", SIGHTS, ids=str)
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_dense_is_what_the_paper_says(window, packed):
    packing = Packing(LENGTHS, time=7) if packed else None
    q, k, v = qkv(batch=len(packing.document_RW) if packed else 3)
    out = dense(q, k, v, window, packing)
    for row in range(len(q)):
        documents = packing.document_RW[row].tolist() if packed else [0] * 7
        real = sum(document >= 0 for document in documents)
        for head in range(2):
            at = (row, head, slice(real))
            expected = literal(q[at], k[at], v[at], window, documents[:real])
            torch.testing.assert_close(out[at], expected, atol=1e-5, rtol=0)


def test_dense_by_hand():
    q = torch.tensor([[[[0.0], [0.0], [0.0]]]])  # equal scores: means over what is seen
    v = torch.tensor([[[[1.0], [3.0], [8.0]]]])
    torch.testing.assert_close(dense(q, q, v, AttentionWindow())[0, 0, :, 0], torch.tensor([1.0, 2.0, 4.0]))
    torch.testing.assert_close(dense(q, q, v, AttentionWindow(size=2))[0, 0, :, 0], torch.tensor([1.0, 2.0, 5.5]))


def usable(device, dtype=torch.float32):
    for name in sorted(BACKENDS):
        for window in SIGHTS:
            for packed in (False, True):
                why = find_obstacle(name, device, dtype, window.within(7), packed=packed)
                if why is None or (name == "flex" and device == CPU):
                    yield pytest.param(name, window, packed, id=f"{name}-{window}-{'packed' if packed else 'padded'}")


@pytest.mark.parametrize("backend", ["dense", "sdpa", "banded"])
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_zeroes_single_weights_and_scales_the_others(backend, packed):
    if packed and backend == "banded":
        pytest.skip("is not for packed rows")
    torch.manual_seed(0)
    packing = Packing(LENGTHS, time=7) if packed else None
    q, k, _ = qkv(batch=len(packing.document_RW) if packed else 40, heads=50, size=7).detach()
    window = AttentionWindow(size=3, sink=1, dropout=0.25)
    expected = attention.compute_weights(q, k, window, packing)
    values = torch.eye(7).expand(*q.shape[:2], -1, -1)  # what comes out are the weights
    found = BACKENDS[backend](q, k, values, window, packing)
    kept = found != 0
    torch.testing.assert_close(found[kept], expected[kept] / 0.75)
    assert kept[expected > 0].float().mean().item() == pytest.approx(0.75, abs=0.03)
    torch.testing.assert_close(BACKENDS[backend](q, k, values, AttentionWindow(size=3, sink=1), packing), expected)


def masks_alive():
    """Elements of all boolean tensors there are."""
    gc.collect()
    return sum(x.numel() for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.bool)


@pytest.mark.system
@pytest.mark.parametrize(("backend", "window"), some([("sdpa", 700), ("banded", 300), ("dense", 700)], 0))
def test_masks_of_long_windows_are_not_kept_and_of_short_ones_are_bounded(backend, window, monkeypatch):
    monkeypatch.setattr(attention, "KEPT", 1 << 10)
    attention._call_kept.cache_clear()
    before = masks_alive()
    for length in range(1000, 1004):
        q, k, v = qkv(batch=1, heads=1, length=length).detach()
        ours = attend(q, k, v, window=AttentionWindow(size=window, sink=2), backend=backend)
        torch.testing.assert_close(ours[0, 0, -1], literal_row(q[0, 0], k[0, 0], v[0, 0], window, 2))
    assert masks_alive() == before
    for length in range(5, 31):  # each its own mask
        attend(*qkv(batch=1, heads=1, length=length).detach(), window=AttentionWindow(size=4), backend="sdpa")
    kept = masks_alive()
    assert 0 < kept - before <= 16 * (1 << 10)
    attend(*qkv(batch=1, heads=1, length=30).detach(), window=AttentionWindow(size=4), backend="sdpa")
    assert masks_alive() == kept


def literal_row(q, k, v, window, sink):
    """The last query's output."""
    seen = [j for j in range(len(q)) if len(q) - 1 - j < window or j < sink]
    return (k[seen] @ q[-1] / math.sqrt(q.shape[-1])).softmax(0) @ v[seen]


def on_cuda():
    return list(usable(CUDA, torch.bfloat16)) if torch.cuda.is_available() else []


def compare(backend, window, packing, real, *, size=4, device=CPU, dtype=torch.float32, **tolerance):
    batch = 3 if packing is None else len(packing.document_RW)
    ours = qkv(batch, size=size, device=device, dtype=dtype)
    theirs = ours.detach().float().requires_grad_()  # the same numbers: only `ours` is rounded on the way
    window = window.within(7)
    if backend == "flex" and device == CPU:  # knows no backward there
        ours = ours.detach()
    out, expected = BACKENDS[backend](*ours, window, packing), dense(*theirs, window, packing)
    out, expected = (x.transpose(1, 2)[real] for x in (out.float(), expected))
    torch.testing.assert_close(out, expected, **tolerance)
    if not ours.requires_grad:
        return
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad.float(), theirs.grad, **tolerance)


def on_cpu():
    """The quick tier has each mask of `flex`, which is slow here, packed or padded only."""
    for case in usable(CPU):
        backend, window, packed = case.values
        rest = backend == "flex" and packed != SIGHTS.index(window) % 2
        yield pytest.param(*case.values, id=case.id, marks=[pytest.mark.full] if rest else [])


@pytest.mark.parametrize(("backend", "window", "packed"), list(on_cpu()))
def test_backend_equals_dense_in_value_and_gradient(backend, window, packed):
    packing = Packing(LENGTHS, time=7) if packed else None
    real = packing.real_RW if packed else torch.ones(3, 7, dtype=torch.bool)
    compare(backend, window, packing, real)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("size", [32, 6])
@pytest.mark.parametrize(("backend", "window", "packed"), on_cuda())
def test_backend_equals_dense_on_cuda(backend, window, packed, size):
    if size == 6 and window not in SIGHTS[:3]:
        pytest.skip("heads of another size: with a few masks")
    torch.compiler.reset()  # a kernel for every mask, however many there have been
    attention._compile_flex.cache_clear()
    packing = Packing(LENGTHS, time=7, device="cuda") if packed else None
    real = packing.real_RW if packed else torch.ones(3, 7, dtype=torch.bool, device="cuda")
    compare(backend, window, packing, real, size=size, device=CUDA, dtype=torch.bfloat16, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("window", SIGHTS, ids=str)
def test_autocast_takes_and_gives_any_precision(window):
    q, k, v = qkv().detach()
    expected = dense(q, k, v, window)
    for enabled in (torch.no_grad, torch.enable_grad):
        with enabled(), torch.autocast("cpu", torch.bfloat16):
            out = attend(q, k, v.bfloat16(), window=window)
        torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=0)


def test_the_choice_follows_what_can_be_used():
    long = {"length": 1024}
    assert choose("auto", CPU, torch.float32, AttentionWindow(), **long) == "sdpa"
    assert choose("auto", CPU, torch.float32, AttentionWindow(size=64), **long) == "banded"
    assert choose("auto", CPU, torch.float32, AttentionWindow(size=64), **long, packed=True) == "sdpa"
    assert choose("auto", CPU, torch.float32, AttentionWindow(size=1000), **long) == "sdpa"
    assert choose("auto", CPU, torch.float32, AttentionWindow(logit_clip=30.0), **long) == "dense"
    assert choose("dense", CPU, torch.float32, AttentionWindow(), **long) == "dense"
    assert choose("flash", CPU, torch.bfloat16, AttentionWindow(), **long) == "sdpa"  # speed only
    assert "CUDA" in find_obstacle("flash", CPU, torch.bfloat16, AttentionWindow())
    assert AttentionWindow(size=9, dropout=0.1).within(9) == AttentionWindow(dropout=0.1)


def test_backends_of_cuda_are_chosen_where_they_are_installed(monkeypatch):
    monkeypatch.setattr("pipelines.nets.attention.lacks", lambda name: None)
    assert choose("auto", CUDA, torch.bfloat16, AttentionWindow(size=9), length=64, packed=True) == "flash"
    assert choose("auto", CUDA, torch.float32, AttentionWindow(), length=64) == "sdpa"
    assert choose("auto", CUDA, torch.bfloat16, AttentionWindow(size=9, sink=1), length=64) == "flex"
    assert choose("flex", CUDA, torch.bfloat16, AttentionWindow(dropout=0.1), length=64) == "sdpa"
    assert choose("auto", CUDA, torch.bfloat16, AttentionWindow(), length=64) == "sdpa"
    assert choose("auto", CUDA, torch.bfloat16, AttentionWindow(logit_clip=30.0), length=64) == "flash"
    assert choose("flex", CUDA, torch.bfloat16, AttentionWindow(size=9, dropout=0.1), length=64) == "flash"
    monkeypatch.setattr("pipelines.nets.attention.lacks", lambda name: "away" if name == "flash" else None)
    assert choose("auto", CUDA, torch.bfloat16, AttentionWindow(dropout=0.1), length=64, packed=True) == "sdpa"
    assert choose("auto", CUDA, torch.bfloat16, AttentionWindow(size=9), length=64, packed=True) == "varlen"
    assert choose("auto", CUDA, torch.bfloat16, AttentionWindow(), length=64) == "sdpa"
    assert choose("auto", CUDA, torch.float32, AttentionWindow(size=9), length=64) == "flex"
    monkeypatch.setattr("pipelines.nets.attention.lacks", lambda name: "away")
    assert choose("auto", CUDA, torch.float32, AttentionWindow(size=9), length=64) == "banded"


def test_a_broken_flash_attn_is_as_none(monkeypatch, tmp_path):
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    attention.lacks.cache_clear()
    try:
        assert (
            find_obstacle("flash", CUDA, torch.bfloat16, AttentionWindow())
            == "flash-attn cannot be imported (undefined symbol)"
        )
        assert choose("auto", CUDA, torch.bfloat16, AttentionWindow(), length=64) == "sdpa"
    finally:
        attention.lacks.cache_clear()


def test_kernels_of_varlen_get_documents_and_heads_of_eights(monkeypatch):
    """Its arguments, as the dense reference stands in for a GPU."""
    torch_varlen = pytest.importorskip("torch.nn.attention.varlen")
    seen = []

    def stand_in(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale, window_size):
        seen.append((q.shape[-1] % 8, ends_q.dtype, longest_q, window_size))
        out = torch.empty_like(q)
        for first, last in pairwise(ends_q.tolist()):
            part = slice(first, last)
            heads = [x[part].transpose(0, 1)[None] for x in (q * (scale * math.sqrt(q.shape[-1])), k, v)]
            out[part] = dense(*heads, AttentionWindow(size=window_size[0] + 1))[0].transpose(0, 1)
        return out

    inspect.signature(torch_varlen.varlen_attn).bind(*range(7), scale=1.0, window_size=(2, 0))
    monkeypatch.setattr(torch_varlen, "varlen_attn", stand_in)
    packing = Packing(LENGTHS, time=7)
    q, k, v = qkv(len(packing.document_RW), size=6).detach()
    out = BACKENDS["varlen"](q, k, v, AttentionWindow(size=3), packing)
    expected = dense(q, k, v, AttentionWindow(size=3), packing)
    real = packing.real_RW
    torch.testing.assert_close(out.transpose(1, 2)[real], expected.transpose(1, 2)[real])
    assert seen == [(0, torch.int32, 7, (2, 0))]


@pytest.mark.parametrize("cap", [None, 0.7])
def test_cached_query_equals_last_row_and_ignores_empty_slots(cap):
    q, k, v = qkv().detach()
    visible = torch.arange(7)[None] < torch.tensor([[7], [4], [1]])
    out = attend_cached(q[:, :, -1], k, v, visible, cap)
    for actor, length in enumerate((7, 4, 1)):
        one = slice(actor, actor + 1)
        query = q[one, :, -1:].expand(-1, -1, length, -1)
        expected = dense(query, k[one, :, :length], v[one, :, :length], AttentionWindow(logit_clip=cap))[0, :, -1]
        torch.testing.assert_close(out[actor], expected)
