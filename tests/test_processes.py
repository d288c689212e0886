"""Child processes: what they import, messages, errors and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import numpy as np
import pytest

from pipelines.errors import AmagoError, StageFailed, UsageError
from pipelines.processes import RemoteTraceback, describe_exit, end_process, pack_error, receive, send, start_python


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
