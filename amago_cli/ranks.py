"""Several processes that train together: `train.ranks`, and what each of them prints."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amago_cli.invocation import Invocation

if TYPE_CHECKING:
    from amago_cli.errors import Failure
    from pipelines.config.settings import TrainSettings

_REPORT_SECONDS = 8.0  # in which rank 0 comes to the same error
_SILENT = ("ReportedElsewhere", "RankLost", "Interrupted")


def refuse_other_commands(invocation: Invocation) -> None:
    """Raise UsageError for a command that a launcher has started several times, unless it trains."""
    from pipelines.config.launch import announced
    from pipelines.errors import UsageError

    if announced() > 1 and invocation.command not in ("train", "run", ""):
        raise UsageError(
            f"'amago {invocation.command}' was started {announced()} times by a launcher; only train and run may be",
            hint="start it once, without torchrun",
        )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """`amago` with `arguments`, to be run in as many processes of this host. After a signal, which is passed on to
    them, they have `timeout_seconds` to save."""

    ranks: int
    arguments: Sequence[str]
    timeout_seconds: float


def launched(invocation: Invocation, train: TrainSettings) -> Launch | None:
    """Return the processes in which this call is to be repeated, unless it is one of them or needs no others."""
    from pipelines.config.launch import announced

    if train.ranks == 1 or announced() > 1:
        return None
    return Launch(ranks=train.ranks, arguments=invocation.arguments, timeout_seconds=train.rank_timeout)


def launch(launch: Launch) -> int:
    """Run the processes, and return the exit code of the first that failed, 0 if none did. Rank 0 prints the result.

    StageFailed if rank 0 was killed: it has printed nothing.
    """
    import dataclasses
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from pipelines.config.cores import available_cores

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks report their errors themselves
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // launch.ranks)))
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    grace: dict[str, Any] = (
        {"shutdown_timeout": int(launch.timeout_seconds)} if "shutdown_timeout" in known else {}
    )  # torch 2.13
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=launch.ranks,
        run_id=f"amago-{os.getpid()}",
        rdzv_backend="static",  # "c10d" fails where its store does not answer for a minute, on a busy host
        rdzv_endpoint=f"localhost:{_free_port()}",
        rdzv_configs={"rank": 0},
        max_restarts=0,
        monitor_interval=0.1,
        **grace,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "amago_cli", *launch.arguments)
    except ChildFailedError as error:
        return _exit_code({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _free_port() -> int:
    import socket

    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def reports(failure: Failure) -> bool:
    """Return whether this process reports `failure`: rank 0 does, and others do if it is theirs alone."""
    if "RANK" not in os.environ:  # without importing the engine, which may be what failed
        return True
    from pipelines.config.launch import is_main

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


def end_failed(code: int) -> None:
    """End this process at once with `code` if it is connected to other ranks: threads of gloo that wait for one that
    has ended would abort the interpreter's exit (SIGABRT)."""
    module = sys.modules.get("pipelines.nets.ranks")
    if module is not None and module.size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def inform_launcher(failure: Failure) -> None:
    """Write the file from which torchrun takes the reason of a failure, and ignore its signal to end from now on: this
    process reports, and ends by itself."""
    import json

    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not place:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
    killed = {rank: signal.Signals(-code).name for rank, code in codes.items() if code < 0 and -code not in ends}
    if not killed:
        return reported if reported > 1 else next((code for code in codes.values() if code > 1), 1)
    text = "; ".join(f"rank {rank} was killed by {name}" for rank, name in killed.items())
    code = 128 - codes[min(killed)]
    if 0 not in killed:
        print(text, file=sys.stderr)
        return code
    from pipelines.errors import StageFailed

    error = StageFailed(text, hint="repeat the command to resume")
    error.exit_code = code
    raise error
