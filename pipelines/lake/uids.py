"""Uids as numpy "S16", which compares and sorts but hides zeros at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


def positions(among: np.ndarray, wanted: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """Return the index (n,) of each of `wanted` in `among`, -1 where it is missing; `order` sorts `among`, if known."""
    if not len(among):
        return np.full(len(wanted), -1)
    known, given = halves(among), halves(wanted)
    if order is None:
        order = np.lexsort((known.second, known.first))
    known = known.at(order)
    place = np.minimum(known.place(given), len(order) - 1)
    return np.where(known.at(place).differ(given), -1, order[place])


def contains(ordered: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return (n,) bool: which of `wanted` are in a sorted array."""
    if not len(ordered):
        return np.zeros(len(wanted), dtype=bool)
    known, given = halves(ordered), halves(wanted)
    # Looking up the first bits is ten times as fast as a search, and rules out nearly all of those that are not here.
    shift = np.uint64(64 - min(len(ordered).bit_length() + 4, 24))
    begins = np.zeros(1 << (64 - int(shift)), dtype=bool)
    begins[known.first >> shift] = True
    found = begins[given.first >> shift]
    rows = np.flatnonzero(found)
    searched = given.at(rows)
    found[rows] = ~known.at(np.minimum(known.place(searched), len(ordered) - 1)).differ(searched)
    return found


def unite(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join arrays of uids ("S16") into a sorted one without duplicates. `np.unique`, which hashes texts, takes five
    times as long.
    """
    ordered = np.sort(np.concatenate([np.zeros(0, "S16"), *parts]))
    first = np.ones(len(ordered), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def raw_uids(uids: Sequence[str]) -> np.ndarray:
    """Convert uids of 32 hex digits to "S16" (n,)."""
    return np.frombuffer(bytes.fromhex("".join(uids)), dtype="S16")


def find_place(ordered: np.ndarray, uid: str) -> int | None:
    """Return the index of a uid of 32 hex digits in a sorted array of uids; None if it is missing."""
    try:
        raw = np.array([bytes.fromhex(uid)], dtype="S16")
    except ValueError:
        return None
    place = int(np.searchsorted(ordered, raw)[0])
    return place if len(uid) == 32 and place < len(ordered) and ordered[place] == raw[0] else None


class Halves(NamedTuple):
    """Uids as pairs of uint64 arrays (n,): numbers are searched 20 times faster than texts."""

    first: np.ndarray
    second: np.ndarray

    def at(self, rows: np.ndarray | slice) -> Halves:
        """Select those at `rows`."""
        return Halves(self.first[rows], self.second[rows])

    def differ(self, other: Halves) -> np.ndarray:
        """Compare pairwise; return (n,) bool."""
        return (self.first != other.first) | (self.second != other.second)

    def place(self, wanted: Halves) -> np.ndarray:
        """Return (n,), the index of the first uid here, in this order, that is not less than each of `wanted`."""
        # In order, neighbours are searched for in the same memory: five times as fast among millions.
        by_first = np.argsort(wanted.first)
        wanted = wanted.at(by_first)
        low = np.searchsorted(self.first, wanted.first)
        alike = np.flatnonzero(self.first[np.minimum(low, len(self.first) - 1)] == wanted.first)
        if len(alike):  # first halves are random: rare but for uids that are here
            begin, second = low[alike], wanted.second[alike]
            end = np.searchsorted(self.first, wanted.first[alike], side="right")
            while (open := begin < end).any():
                middle = (begin + end) // 2
                before = open & (self.second[np.minimum(middle, len(self.second) - 1)] < second)
                begin, end = np.where(before, middle + 1, begin), np.where(open & ~before, middle, end)
            low[alike] = begin
        found = np.empty_like(low)
        found[by_first] = low
        return found


def halves(uids: np.ndarray) -> Halves:
    """Split uids ("S16") into halves, which sort as uids do."""
    pairs = np.ascontiguousarray(uids).view(">u8").reshape(-1, 2).astype(np.uint64)
    return Halves(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]))


class UidSet:
    """A set of uids that stores 8 bytes of each, a hash of it: sorted runs, merged like a binary counter.

    `find` maps uids ("S16") to (n,) bool: which of them are in the set. It is asked only about uids whose hash is
    here, nearly all of which are. It may search all uids, which the owner of the set has anyway. None: nothing is added
    twice.
    """

    def __init__(self, find: Callable[[np.ndarray], np.ndarray] | None = None) -> None:
        self._find = find
        self._runs: list[np.ndarray] = []

    def add(self, uids: np.ndarray) -> np.ndarray:
        """Add `uids` ("S16"); returns (n,) bool: which were new, only the first of equal ones."""
        hashes, new = _hash(uids), np.ones(len(uids), dtype=bool)
        run = np.sort(hashes)
        doubtful, alike = self._may_have(run), run[1:] == run[:-1]
        doubtful[1:] |= alike
        doubtful[:-1] |= alike
        if doubtful.any():
            places = np.flatnonzero(np.isin(hashes, run[doubtful]))
            pairs = halves(uids[places])
            by_uid = np.lexsort((pairs.second, pairs.first))  # equal ones stay in the order given
            ordered = pairs.at(by_uid)
            first = np.ones(len(places), dtype=bool)
            first[by_uid[1:]] = ordered.at(slice(1, None)).differ(ordered.at(slice(-1)))
            new[places] = first & ~self.contains(uids[places])
            run = np.sort(hashes[new])
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]), kind="stable")  # which merges what is in order
        if len(run):
            self._runs.append(run)
        return new

    def contains(self, uids: np.ndarray) -> np.ndarray:
        """Return (n,) bool: which of `uids` ("S16") are here."""
        found = self._may_have(_hash(uids))
        if self._find is not None and found.any():
            found[found] = self._find(uids[found])
        return found

    def discard(self, uids: np.ndarray) -> None:
        """Remove `uids` ("S16"), different ones which are all here."""
        gone = np.sort(_hash(uids))
        for number, known in enumerate(self._runs):
            # Different uids may have one hash, which is then here as often.
            place = np.searchsorted(known, gone) + np.arange(len(gone)) - np.searchsorted(gone, gone)
            found = known[np.minimum(place, len(known) - 1)] == gone
            found &= place < len(known)
            if found.any():
                kept = np.ones(len(known), dtype=bool)
                kept[place[found]] = False
                self._runs[number], gone = known[kept], gone[~found]
        self._runs = [run for run in self._runs if len(run)]

    def _may_have(self, hashes: np.ndarray) -> np.ndarray:
        """Return (n,) bool: which of `hashes`, best in order, are those of uids that are here."""
        found = np.zeros(len(hashes), dtype=bool)
        for known in self._runs:
            found |= known[np.minimum(np.searchsorted(known, hashes), len(known) - 1)] == hashes
        return found


def _hash(uids: np.ndarray) -> np.ndarray:
    """Hash uids ("S16") to (n,) uint64. Numbers are searched 20 times faster than texts. Uids are random but for those
    that others chose, which may share one half."""
    pairs = np.ascontiguousarray(uids).view("<u8").reshape(-1, 2)
    found: np.ndarray = pairs[:, 0] + pairs[:, 1] * np.uint64(0x9E3779B97F4A7C15)
    return found
