"""Uids as numpy has them: "S16", which compares and sorts but hides zeros at the end."""

from __future__ import annotations

import numpy as np


def positions(among: np.ndarray, wanted: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """(n,) place of each of `wanted` in `among`, -1 where it is not; `order` sorts `among`, if known."""
    if not len(among):
        return np.full(len(wanted), -1)
    if order is None:
        order = np.argsort(among)
    place = order[np.minimum(np.searchsorted(among, wanted, sorter=order), len(order) - 1)]
    return np.where(among[place] == wanted, place, -1)


def place_of(ordered: np.ndarray, uid: str) -> int | None:
    """Place of a uid of 32 hex digits in a sorted array of uids; None if it is not there."""
    try:
        raw = np.array([bytes.fromhex(uid)], dtype="S16")
    except ValueError:
        return None
    place = int(np.searchsorted(ordered, raw)[0])
    return place if len(uid) == 32 and place < len(ordered) and ordered[place] == raw[0] else None


class UidSet:
    """A growing set of uids in 16 bytes each: sorted runs, merged like a binary counter."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def add(self, uids: np.ndarray) -> np.ndarray:
        """(n,) bool: which of `uids` ("S16") were new, the first of equal ones only; all of them are in it
        now.
        """
        values, first = np.unique(uids, return_index=True)
        fresh = np.ones(len(values), dtype=bool)
        for run in self._runs:
            place = np.minimum(np.searchsorted(run, values), len(run) - 1)
            fresh &= run[place] != values
        new = np.zeros(len(uids), dtype=bool)
        new[first[fresh]] = True
        run = values[fresh]
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]), kind="stable")
        if len(run):
            self._runs.append(run)
        return new
