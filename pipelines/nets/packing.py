"""Windows of different lengths laid side by side in shared rows, so that padding costs nothing.

A packed row holds whole windows one after the other, each a document of its own: attention is masked, and recurrent
encoders reset where a document begins. B windows, T time, N valid tokens, R rows, W places of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class Packing:
    """Placement of the tokens of windows of `lengths` (B,), padded to `time`, in rows as long as the longest window.

    `document_RW`: index of the window at each place, -1 if empty; empty places are at the end of a row. `age_RW`: index
    of the token within its window. `real_RW`: whether a place holds a token (bool). `begins_RW`: whether a document
    begins there; each empty place counts as one. `tokens_N`: the places that hold a token, in order, among the R W.
    `cumulative`: where each document begins among those, and where the last ends; int32, as kernels require.

    Everything is computed on the CPU before it moves to `device`: no device sync, and no shape that a compiler cannot
    infer.
    """

    def __init__(self, lengths: Sequence[int], *, time: int, device: torch.device | str = "cpu") -> None:
        self.shape, self.width = (len(lengths), time), max(lengths)
        rows = self._assign_rows(lengths, self.width)
        document = torch.full((len(rows), self.width), -1, device="cpu")
        age = torch.zeros_like(document)
        place = torch.zeros(self.shape, dtype=torch.int64, device="cpu")
        for row, windows in enumerate(rows):
            first = 0
            for window in windows:
                length = lengths[window]
                index = torch.arange(length, device="cpu")
                document[row, first : first + length] = window
                age[row, first : first + length] = index
                place[window, :length] = index + (row * self.width + first)
                first += length
        follow = [lengths[window] for windows in rows for window in windows]  # in the order of documents
        ends = torch.tensor([0, *follow], device="cpu").cumsum(0)
        self._document, self._age = document, age
        tokens = (document >= 0).flatten().nonzero()[:, 0]
        source = document.clamp_min(0) * time + age
        whole = [document, age, tokens, ends, place.flatten(), source.flatten()]
        flat = torch.cat([each.flatten() for each in whole]).to(device)  # one copy: each costs as much as a kernel
        parts = flat.split([each.numel() for each in whole])
        self.document_RW, self.age_RW = (part.view(document.shape) for part in parts[:2])
        self.real_RW = self.document_RW >= 0
        self.begins_RW = (self.age_RW == 0) | (self.document_RW < 0)
        self.tokens_N, self.cumulative = parts[2], parts[3].int()
        self._place, self._source = parts[4:]
        self._kept: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, lengths: Sequence[int], like_BT: Tensor) -> Packing | None:
        """Pack windows of `lengths` tokens, padded to the shape of `like_BT`, on its device; None unless it saves
        rows."""
        packing = cls(lengths, time=like_BT.shape[1], device=like_BT.device)
        return packing if len(packing.document_RW) < len(like_BT) else None

    def pack(self, x_BT: Tensor) -> Tensor:
        """Map (B, T, ...) to (R, W, ...); empty places hold an arbitrary token."""
        rows = x_BT.flatten(0, 1).index_select(0, self._source)
        return rows.unflatten(0, self.document_RW.shape)

    def unpack(self, x_RW: Tensor) -> Tensor:
        """Map (R, W, ...) to (B, T, ...); padding holds an arbitrary token."""
        return x_RW.flatten(0, 1).index_select(0, self._place).unflatten(0, self.shape)

    def take_tokens(self, x_RHWD: Tensor) -> Tensor:
        """Map (R, H, W, Dh) to (N, H, Dh): document after document, without empty places."""
        return x_RHWD.transpose(1, 2).flatten(0, 1).index_select(0, self.tokens_N)

    def put_tokens(self, x_NHD: Tensor) -> Tensor:
        """Undo `take_tokens`; empty places are zero."""
        rows, width = self.document_RW.shape
        out = x_NHD.new_zeros(rows * width, *x_NHD.shape[1:]).index_copy(0, self.tokens_N, x_NHD)
        return out.unflatten(0, (rows, width)).transpose(1, 2)

    @cached_property
    def by_age(self) -> tuple[Tensor, Tensor]:
        """Places of tokens in the order of recurrent networks, for which documents are side by side from the longest:
        all first tokens, then all second ones, ...; and how many there are of each (on the CPU)."""
        real_RW = self._document >= 0
        document_N, age_N = self._document[real_RW], self._age[real_RW]
        rank = torch.empty(self.shape[0], dtype=torch.int64, device="cpu")
        size = torch.bincount(document_N, minlength=self.shape[0])
        rank[size.argsort(descending=True, stable=True)] = torch.arange(self.shape[0], device="cpu")
        order_N = (age_N * self.shape[0] + rank[document_N]).argsort().to(self.tokens_N.device)
        return self.tokens_N[order_N], torch.bincount(age_N)

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Get the value cached under `key`, made on first use: masks are the same for all layers."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    @staticmethod
    def _assign_rows(lengths: Sequence[int], width: int) -> list[list[int]]:
        """Assign windows to rows: the longest first, each to the first row that has room."""
        # First-fit decreasing needs at most 11/9 of the fewest rows, plus one.
        rows: list[list[int]] = []
        room: list[int] = []
        for window in sorted(range(len(lengths)), key=lambda window: -lengths[window]):
            length = lengths[window]
            row = next((row for row, free in enumerate(room) if free >= length), len(rows))
            if row == len(rows):
                rows.append([])
                room.append(width)
            rows[row].append(window)
            room[row] -= length
        return rows
