"""What speeds updates up without changing their results."""

import ctypes
import sys

import numpy as np
import pytest

from pipelines.training.speed import keep_freed_memory

TRIM_THRESHOLD, MMAP_THRESHOLD, DEFAULT = -1, -3, 128 * 1024


def faults() -> int:
    """Count the pages that a hundred arrays of a MiB, each freed before the next, take from the system."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        np.ones(1 << 17)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone")
def test_freed_memory_is_used_again() -> None:
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(MMAP_THRESHOLD, DEFAULT)
    mallopt(TRIM_THRESHOLD, DEFAULT)
    try:
        assert faults() > 100 * 200  # of 256 pages each
    finally:
        keep_freed_memory()
    faults()
    assert faults() < 100 * 20
