"""Child processes: what they import, messages, errors and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pipelines.errors import AmagoError, StageFailed, UsageError
from pipelines.processes import (
    ForkedProcess,
    ForkServer,
    RemoteTraceback,
    describe_exit,
    end_process,
    pack_error,
    receive,
    send,
    start_python,
)


def test_a_child_imports_what_this_process_can_and_inherits_a_descriptor() -> None:
    ours, theirs = os.pipe()
    code = f"from pipelines.processes import send; send({theirs}, __name__)"
    with start_python(code, descriptors=[theirs]) as child:
        os.close(theirs)
        assert receive(ours) == "__main__"
        with pytest.raises(EOFError):
            receive(ours)
    os.close(ours)
    assert describe_exit(child.returncode) == "ended with exit code 0"


@pytest.mark.parametrize(("seconds", "how"), [(0.0, "was killed by SIGKILL"), (60.0, "ended with exit code 3")])
def test_a_child_that_does_not_end_in_time_is_killed(seconds: float, how: str) -> None:
    child = start_python("sys.stdin.read(); sys.exit(3)", stdin=subprocess.PIPE)
    assert child.stdin is not None
    if seconds:
        child.stdin.close()
    end_process(child, seconds)
    assert describe_exit(child.returncode) == how


def test_a_child_has_a_session_of_its_own() -> None:
    child = start_python("sys.stdin.read()", stdin=subprocess.PIPE)
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    child.send_signal(signal.SIGTERM)
    assert describe_exit(child.wait()) == "was killed by SIGTERM"


@contextlib.contextmanager
def forking(*modules: str) -> Iterator[Callable[[], tuple[socket.socket, ForkedProcess, dict[str, Any]]]]:
    """A function that forks a child of a server, which has imported `modules`: a socket, the child, what it sent."""
    with contextlib.ExitStack() as stack:
        server = ForkServer("tests.forked:act", modules, {**os.environ, "OMP_NUM_THREADS": "1"})
        stack.callback(server.close)

        def fork() -> tuple[socket.socket, ForkedProcess, dict[str, Any]]:
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            with theirs:
                child = server.fork(theirs.fileno())
            return ours, child, receive(ours.fileno())

        yield fork


def test_forked_children_are_told_apart_and_report_how_they_end() -> None:
    with forking() as fork:
        children = [fork() for _ in range(4)]
        told = [each for _, _, each in children]
        assert [each["pid"] for each in told] == [child.pid for _, child, _ in children]
        assert len({each["server"] for each in told}) == 1
        assert all(each["session"] == each["pid"] for each in told)
        assert len({each["drawn"] for each in told}) == 4
        # A child that kept the sockets of others would hide their ends from the driver.
        assert len({each["descriptors"] for each in told}) == 1
        for (ours, _, _), how in zip(children[1:], (0, 3, "kill"), strict=True):
            send(ours.fileno(), how)
        assert [child.wait() for _, child, _ in children[1:]] == [0, 3, -signal.SIGTERM]
        first, child, _ = children[0]
        child.kill()
        assert [child.wait(), child.wait()] == [-signal.SIGKILL] * 2
        assert first.recv(1) == b""
        child.kill()  # without effect: the number may be that of another process by now


def test_a_killed_fork_server_leaves_its_children_and_forks_no_more() -> None:
    with forking() as fork:
        ours, child, told = fork()
        os.kill(told["server"], signal.SIGKILL)
        assert child.wait() == 255
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            fork()
        send(ours.fileno(), 0)  # it still listens
        assert ours.recv(1) == b""


@pytest.mark.system
def test_what_collectors_and_evaluators_import_starts_no_thread_and_touches_no_gpu() -> None:
    with forking("pipelines.stages.collectors", "pipelines.stages.evaluate") as fork:
        told = [fork()[2] for _ in range(2)]
    assert [each["threads of the server"] for each in told] == [1, 1]
    assert not any(each["cuda"] or each["allocator"] for each in told)
    assert told[0]["drawn by numpy"] != told[1]["drawn by numpy"]


def test_messages_of_any_size_arrive_in_order() -> None:
    ours, theirs = os.pipe()
    large = np.arange(1 << 18)  # more than a pipe holds
    sent = [{"values": large, "text": "a"}, None, [np.zeros(0), "b"]]
    writer = threading.Thread(target=lambda: [send(theirs, each) for each in sent])
    writer.start()
    waits: list[int] = []
    found = [receive(ours, lambda: waits.append(1)) for _ in sent]
    writer.join()
    assert np.array_equal(found[0]["values"], large)
    assert found[0]["text"] == "a"
    assert found[1] is None
    assert found[2][1] == "b"
    assert len(waits) >= 3 * len(sent)
    os.close(theirs)
    with pytest.raises(EOFError):
        receive(ours)
    os.close(ours)


class _Unsendable(UsageError):
    def __init__(self) -> None:
        super().__init__("it cannot be pickled", hint="none")

    def __reduce__(self) -> str:
        raise TypeError


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (UsageError("wrong", hint="right"), UsageError, "wrong"),
        (_Unsendable(), StageFailed, "it cannot be pickled"),
        (ZeroDivisionError("by zero"), StageFailed, "a part: ZeroDivisionError: by zero"),
    ],
    ids=["ours", "unsendable", "other"],
)
def test_a_packed_error_keeps_its_message_and_traceback(error: Exception, kind: type[AmagoError], message: str) -> None:
    try:
        raise error
    except Exception as caught:
        unpacked = pack_error(caught, "a part: ").unpack()
    assert type(unpacked) is kind
    assert unpacked.message == message
    assert isinstance(unpacked.__cause__, RemoteTraceback)
    assert "test_processes.py" in str(unpacked.__cause__)
