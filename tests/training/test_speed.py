"""What speeds updates up without changing their results."""

import ctypes
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

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


def measure_faults() -> tuple[int, int]:
    """Count faults as the system sets memory up, and once freed memory is kept."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(MMAP_THRESHOLD, DEFAULT)
    mallopt(TRIM_THRESHOLD, DEFAULT)
    before = faults()
    keep_freed_memory()
    faults()
    return before, faults()


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone")
def test_freed_memory_is_used_again() -> None:
    # A process that has run many tests has free memory in its heap, which is used before any is taken from the system.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        before, after = pool.submit(measure_faults).result()
    assert before > 100 * 200  # of 256 pages each
    assert after < 100 * 20
