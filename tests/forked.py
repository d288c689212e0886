"""What children of a fork server do in tests."""

from __future__ import annotations

import os
import random
import signal
import sys

from pipelines.processes import receive, send


def act(descriptor: int) -> None:
    """Send what the child and its server are like; then end as the other end says."""
    send(
        descriptor,
        {
            "pid": os.getpid(),
            "session": os.getsid(0),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "drawn": random.getrandbits(64),
            "drawn by numpy": sys.modules["numpy"].random.bytes(8) if "numpy" in sys.modules else b"",
            "server": os.getppid(),
            "threads of the server": len(os.listdir(f"/proc/{os.getppid()}/task")),
            "cuda": "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized(),
            "allocator": os.environ.get("JE_ARROW_MALLOC_CONF"),
        },
    )
    how = receive(descriptor)
    if how == "raise":
        raise ValueError("by a test")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(how)
