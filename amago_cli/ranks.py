"""Several processes that train together: `--ranks N`, and what each of them prints."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amago_cli.invocation import Invocation

if TYPE_CHECKING:
    from amago_cli.errors import Failure

_SILENT = ("ReportedElsewhere", "RankLost", "Interrupted")


def refuse_other_commands(invocation: Invocation) -> None:
    """Raise UsageError for a command that a launcher has started several times, unless it trains."""
    from pipelines.config.launch import announced
    from pipelines.errors import UsageError

    if announced() > 1 and invocation.command not in ("train", ""):
        raise UsageError(
            f"'amago {invocation.command}' was started {announced()} times by a launcher; only train has ranks",
            hint="start it once, without torchrun",
        )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """`amago` with `arguments`, to be run in as many processes of this host. After a signal, which is passed on to
    them, they have `timeout_seconds` to save."""

    ranks: int
    arguments: Sequence[str]
    timeout_seconds: float


def launch(launch: Launch) -> int:
    """Run the processes, and return the exit code of the first that failed, 0 if none did. Rank 0 prints the result."""
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
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        **grace,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "amago_cli", *launch.arguments)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return _exit_code(next((code for code in codes if code > 1), codes[0]))
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def without_ranks(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without `--ranks N`."""
    kept, words = [], iter(arguments)
    for word in words:
        if word == "--ranks":
            next(words, None)
        elif not word.startswith("--ranks="):
            kept.append(word)
    return kept


def reports(failure: Failure) -> bool:
    """Return whether this process reports `failure`: rank 0 does, and others do if it is theirs alone."""
    if failure.kind not in _SILENT:
        return True
    from pipelines.config.launch import is_main

    if failure.kind == "ReportedElsewhere":
        from pipelines.nets.ranks import wait_for_main

        wait_for_main()
    return is_main()


def inform_launcher(failure: Failure) -> None:
    """Write the file from which torchrun takes the reason of a failure."""
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not place:
        return
    text = f"{failure.message}{f'; {failure.hint}' if failure.hint else ''}"
    extra = {"timestamp": str(int(time.time())), "py_callstack": text}
    message = {"message": {"message": text, "errorCode": failure.exit_code, "extraInfo": extra}}
    with contextlib.suppress(OSError):
        Path(place).write_text(json.dumps(message))


def _exit_code(code: int) -> int:
    """Return the exit code of a process that ended with `code`, which is negative after a signal."""
    return 128 - code if code < 0 else code
