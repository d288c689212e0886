"""Kernels of other packages, by stand-ins that take the same arguments and refuse what the kernels refuse: wherever
`obstacle` permits one, it accepts the call and equals the definition of attention; and a wrong call does not."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.device import CUDA, FakeCuda  # before torch

import torch  # isort: skip

sys.path.insert(0, str(Path(__file__).with_name("packages")))

import flash_attn
from mamba_ssm.ops import selective_scan_interface

from pipelines.config.model import MambaSettings
from pipelines.nets import attention, mamba
from pipelines.nets.attention import AttentionWindow, attend, choose, dense, find_obstacle
from pipelines.nets.packing import Packing
from pipelines.nets.sequence import make_sequence_encoder

LENGTHS = (13, 5, 4, 4, 13)
WINDOWS = [
    AttentionWindow(size=size, sink=sink, logit_clip=clip, dropout=dropout)
    for size, sink, clip, dropout in product((None, 4), (0, 2), (None, 2.0), (0.0, 0.1))
    if size is not None or not sink
]
HALF = torch.bfloat16


def inputs(head: int, packing: Packing | None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = len(LENGTHS) if packing is None else len(packing.document_RW)
    shape = (rows, 2, 13, head)
    return [torch.randn(shape, generator=generator).to(HALF).float() for _ in range(3)]


def errors(backend: str, window: AttentionWindow, *, packed: bool, head: int = 8) -> tuple[float, float]:
    """Return how far output and gradients on the device are from the definition's on the host."""
    here = Packing(LENGTHS, time=13) if packed else None
    there = Packing(LENGTHS, time=13, device=CUDA) if packed else None
    given = [x.requires_grad_() for x in inputs(head, here)]
    real = torch.ones(13, dtype=torch.bool) if here is None else here.real_RW[:, None, :, None]
    real = real[:, None] if here is None else real
    wanted = dense(*given, window, here)
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)) * real
    wanted_grads = torch.autograd.grad((wanted * weight).sum(), given)
    copies = [x.detach().to(HALF).to(CUDA).requires_grad_() for x in given]
    out = attend(*copies, window=window, packing=there, backend=backend)
    grads = torch.autograd.grad((out.float() * weight.to(CUDA)).sum(), copies)
    off = [((a.cpu().float() - b.detach()) * real).abs().max().item() for a, b in zip(grads, wanted_grads, strict=True)]
    return ((out.detach().cpu().float() - wanted.detach()) * real).abs().max().item(), max(off)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["flash", "varlen"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_permitted_windows_equal_the_definition(window: AttentionWindow, backend: str, packed: bool) -> None:
    if find_obstacle(backend, CUDA, HALF, window, packed=packed) is not None:
        assert choose(backend, CUDA, HALF, window, length=13, packed=packed) != backend
        return
    if window.dropout:  # no two kernels drop the same weights
        assert all(torch.isfinite(torch.tensor(errors(backend, window, packed=packed))))
        return
    out, grads = errors(backend, window, packed=packed)
    assert out < 0.03
    assert grads < 0.1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head", [6, 32, 256, 264])
def test_head_sizes_that_a_kernel_lacks_use_another(head: int, packed: bool) -> None:
    out, grads = errors("auto", AttentionWindow(), packed=packed, head=head)
    assert out < 0.03
    assert grads < 0.1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mistake", ["softcap", "window_size", "cu_seqlens_q"])
def test_wrong_calls_are_found(mistake: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "flash_attn_varlen_func" if packed else "flash_attn_func"
    real: Any = getattr(flash_attn, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        if mistake == "softcap":
            kwargs["softcap"] = 0.0
        elif mistake == "window_size":
            kwargs["window_size"] = (kwargs["window_size"][0] + 1, 0)
        elif packed:
            args = (*args[:3], args[3].long(), *args[4:])
        else:
            args = tuple(x.float() for x in args)
        return real(*args, **kwargs)

    monkeypatch.setattr(flash_attn, name, wrong)
    window = AttentionWindow(size=4, logit_clip=2.0)
    assert choose("flash", CUDA, HALF, window, length=13, packed=packed) == "flash"
    try:
        found = errors("flash", window, packed=packed)
    except AssertionError:
        return
    assert found[0] > 0.03


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("built", [True, False])
def test_mamba_equals_its_scan(
    built: bool, packed: bool, precision: str, device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its extension, mamba-ssm can be imported and fails at the first call: then torch's own scan is used."""
    if not built:
        monkeypatch.setattr(selective_scan_interface, "selective_scan_cuda", None)
    mamba.has_kernels.cache_clear()
    here = Packing(LENGTHS, time=13) if packed else None
    there = Packing(LENGTHS, time=13, device=CUDA) if packed else None
    torch.manual_seed(0)
    encoder = make_sequence_encoder(6, MambaSettings(d_model=16, num_layers=2, state=4))
    copy = make_sequence_encoder(6, MambaSettings(d_model=16, num_layers=2, state=4))
    copy.load_state_dict(encoder.state_dict())
    copy = copy.to(CUDA)
    x, time = torch.randn(5, 13, 6), torch.arange(13).expand(5, -1)
    found = []
    for network, packing in ((encoder, here), (copy, there)):
        own_x, own_time = x.to(next(network.parameters()).device), time.to(next(network.parameters()).device)
        if packing is not None:
            own_x, own_time = packing.pack(own_x), packing.pack(own_time)
        with torch.autocast("cuda", HALF, enabled=precision == "bf16"):
            y = network(own_x, own_time, packing)
        found.append((y if packing is None else packing.unpack(y)).detach().cpu().float())
    valid = torch.arange(13) < torch.tensor(LENGTHS)[:, None] if packed else torch.ones(5, 13, dtype=torch.bool)
    assert (found[0] - found[1])[valid].abs().max() < (1e-4 if precision == "float32" else 0.1)
    assert any("selective_scan" in place for place in device.launches) == built


def test_stand_ins_are_found() -> None:
    assert [attention.lacks(name) for name in ("flash", "varlen")] == [None, None]
