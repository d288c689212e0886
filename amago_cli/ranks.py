"""Several processes that train together: `train.ranks`, and what each of them prints."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from amago_cli.invocation import Invocation
from amago_cli.stopping import handled_signals

if TYPE_CHECKING:
    from amago_cli.render.output import Failure
    from pipelines.config.settings import TrainSettings

_POLL_SECONDS = 0.05
_LEAST_MEMORY = 256 << 20  # of a rank, most of it torch
_REPORT_SECONDS = 30.0  # in which rank 0 comes to the same error, on a busy host, too
_SILENT = ("ReportedElsewhere", "RankLost", "Interrupted")


def end_with_launcher() -> None:
    """Let this process end with the launcher that started it, also while it still imports what it needs."""
    if "AMAGO_LAUNCHER" in os.environ:
        from pipelines.config.host import end_with_parent

        end_with_parent()


def refuse_other_commands(invocation: Invocation) -> None:
    """Raise UsageError for a command that a launcher has started several times, unless it trains."""
    from pipelines.config.host import count_ranks
    from pipelines.errors import UsageError

    if count_ranks() > 1 and invocation.command not in ("train", "run", ""):
        raise UsageError(
            f"'amago {invocation.command}' was started {count_ranks()} times by a launcher; only train and run may be",
            hint="start it once, without torchrun",
        )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """`amago` with `arguments`, to be run in as many processes of this host. After a signal, which is passed on to
    them, they have `timeout_seconds` to save."""

    ranks: int
    arguments: Sequence[str]
    timeout_seconds: float

    def run(self) -> int:
        """Run the processes, and return the exit code of the first that failed, 0 if none did. Rank 0 prints the
        result.

        When one fails, or this process gets a signal, the others are signalled as well; those that are still there
        after `timeout_seconds` are killed. StageFailed if rank 0 was killed: it has printed nothing.

        torchrun's launcher does the same, but imports torch, which costs 350 MB and seconds, and always waits 30 s.
        """
        import socket

        from pipelines.config.host import count_cores

        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]  # free once the server is closed
        shared = {
            **os.environ,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, count_cores() // self.ranks))),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.ranks)),
            "AMAGO_LAUNCHER": str(os.getpid()),
        }
        received: list[int] = []

        def pass_on(number: int, frame: FrameType | None) -> None:
            received.append(number)
            _send(processes, number)

        processes: list[subprocess.Popen[bytes]] = []
        before = {number: signal.signal(number, pass_on) for number in handled_signals()}
        try:
            for number in range(self.ranks):
                own = {"RANK": str(number), "LOCAL_RANK": str(number)}
                # A session of its own: a terminal's Ctrl-C reaches the ranks once, by this process.
                command = [sys.executable, "-m", "amago_cli", *self.arguments]
                processes.append(subprocess.Popen(command, env=shared | own, start_new_session=True))
            for number in received:  # while the ranks were started
                _send(processes, number)
            codes = _wait(processes, received, self.timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
        if not any(codes.values()):
            return 0
        return 128 + received[0] if received else _exit_code({rank: code for rank, code in codes.items() if code})


def plan_launch(invocation: Invocation, train: TrainSettings) -> Launch | None:
    """Plan the processes that repeat this call; None if it is one of them or needs no others. UsageError for more than
    the host has memory for: it would end other programs before this one."""
    from pipelines.config.host import count_ranks, find_memory
    from pipelines.errors import UsageError

    if train.ranks == 1 or count_ranks() > 1:
        return None
    if (memory := find_memory()) is not None and train.ranks * _LEAST_MEMORY > memory:
        most = memory // _LEAST_MEMORY
        text = f"train.ranks = {train.ranks:,}: this host has {memory / 2**30:.0f} GiB, enough for {most:,} at most"
        raise UsageError(text, hint="one for each GPU, or for a few cores, is usual")
    return Launch(ranks=train.ranks, arguments=invocation.arguments, timeout_seconds=train.rank_timeout)


def _wait(processes: Sequence[subprocess.Popen[bytes]], received: Sequence[int], timeout: float) -> dict[int, int]:
    """Wait for all processes, and return the exit codes of those that ended by themselves."""
    codes: dict[int, int] = {}
    deadline = math.inf
    while running := [rank for rank, process in enumerate(processes) if process.poll() is None]:
        if deadline == math.inf:
            codes |= {rank: process.returncode for rank, process in enumerate(processes) if rank not in running}
            if any(codes.values()) and not received:
                _send(processes, signal.SIGTERM)
            if any(codes.values()) or received:
                deadline = time.monotonic() + timeout
        elif time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    signalled = {-signal.SIGTERM, -signal.SIGKILL} if deadline != math.inf else set()
    ended = {rank: process.returncode for rank, process in enumerate(processes) if process.returncode is not None}
    return {rank: code for rank, code in ended.items() if code not in signalled} | codes


def _send(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def reports(failure: Failure) -> bool:
    """Decide whether this process reports `failure`: rank 0 does, and another rank if only that rank failed."""
    if "RANK" not in os.environ:  # without importing the engine, which may be what failed
        return True
    from pipelines.config.host import is_main

    if is_main():
        return True
    if failure.kind == "ReportedElsewhere":
        from pipelines.nets.ranks import wait_for_main

        wait_for_main()
    elif failure.kind not in _SILENT:
        # Rank 0 reads the same arguments and files: it reports the same, and the launcher ends this one meanwhile.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_REPORT_SECONDS)
        return True
    return False


def end(code: int) -> None:
    """End this process at once with `code` if it has been connected to other ranks: threads of gloo that wait for one
    that has ended, or have not yet let go of their last tensors, would abort the interpreter's exit (SIGABRT)."""
    module = sys.modules.get("pipelines.nets.ranks")
    if module is not None and module.count_ranks() > 1 and module.has_joined():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def inform_launcher(failure: Failure) -> None:
    """Ignore the launcher's signal to end from now on, since this process reports and then ends by itself, and write
    the file from which torchrun takes the reason of a failure."""
    import json

    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not place and "AMAGO_LAUNCHER" not in os.environ:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not place:
        return
    text = f"{failure.message}{f'; {failure.hint}' if failure.hint else ''}"
    extra = {"timestamp": str(int(time.time())), "py_callstack": text}
    message = {"message": {"message": text, "errorCode": failure.exit_code, "extraInfo": extra}}
    with contextlib.suppress(OSError):
        Path(place).write_text(json.dumps(message))


def _exit_code(codes: Mapping[int, int]) -> int:
    """Return the exit code of ranks of which some ended with `codes`, negative ones by signals. SIGTERM is what the
    launcher sends to the others when one ends; in a safe place, rank 0 ends by it in order, with 143."""
    reported = codes.get(0, 0)
    if reported > 1 and reported != 128 + signal.SIGTERM:
        return reported
    # Threads of gloo may abort a rank that is ended while rank 0 reports.
    ends = (signal.SIGTERM, signal.SIGABRT) if reported > 0 else (signal.SIGTERM,)
    killed = {rank: code for rank, code in codes.items() if code < 0 and -code not in ends}
    if not killed:
        return reported if reported > 1 else next((code for code in codes.values() if code > 1), 1)
    from pipelines.processes import describe_exit

    text = "; ".join(f"rank {rank} {describe_exit(code)}" for rank, code in killed.items())
    code = 128 - codes[min(killed)]
    if 0 not in killed:
        print(text, file=sys.stderr)
        return code
    from pipelines.errors import StageFailed

    error = StageFailed(text, hint="repeat the command to resume")
    error.exit_code = code
    raise error
