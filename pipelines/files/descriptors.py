"""How many files the process may have open."""

from __future__ import annotations

import resource


def reserve_descriptors(wanted: int) -> int:
    """Return how many descriptors may be used for one purpose: `wanted`, or half of what the process may have. The
    other half is left for the rest of the process. The limit is raised as far as that takes and the system allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 2 * wanted:
        raised = 2 * wanted if hard == resource.RLIM_INFINITY else min(2 * wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft // 2)
