"""Exceptions as messages for the user and exit codes for scripts.

0 done, 1 failed, 2 usage, 3 input missing, 4 corrupt data, 5 `--require` not met, 75 locked, 129/130/143 stopped.
"""

from __future__ import annotations

import errno
import re
import sys
import traceback
from dataclasses import replace
from typing import Any

from amago_cli import guard, ranks, streams
from amago_cli.invocation import Invocation
from amago_cli.render import escaping
from amago_cli.render.output import Failure, output_of
from amago_cli.stopping import Stopped

BROKEN_PIPE = 128 + 13
_SPACE = "free some space and repeat the command; what was saved is kept"
_PLACE = "choose a place that can be written and read"
_MACHINE = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EACCES: _PLACE,
    errno.EPERM: _PLACE,
    errno.EROFS: _PLACE,
    errno.ENOTDIR: _PLACE,
    errno.EISDIR: _PLACE,
    errno.EMFILE: "allow more open files, see `ulimit -n`",
}


_EXTRA = re.compile(r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)")
_NOT_POSITIONAL = {"collect": "--env", "relabel": "--from-lake", "train": "--from-lake"}


def refuse_shadowed_engine() -> None:
    """Raise ShadowedEngine when a foreign `pipelines`, or a library from the current directory, would be imported."""
    path = guard.shadow()
    if path is not None:
        raise ShadowedEngine(guard.explain(path))


class ShadowedEngine(Exception):
    """Error: another package named `pipelines` would be imported in place of amago's."""


def report(error: BaseException, invocation: Invocation) -> int:
    """Report `error` in the invocation's format and return the exit code."""
    failure = classify(error)
    ranks.inform_launcher(failure)
    if not ranks.reports(failure):
        return failure.exit_code
    if failure.expected:  # otherwise the traceback includes them
        failure = replace(failure, problems=(*failure.problems, *getattr(error, "__notes__", ())))
    if invocation.verbose or not failure.expected:
        print(escaping.lines("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    try:
        output_of(invocation).failure(failure)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:  # the result cannot be written; the error goes to stderr
        streams.drop_stdout()

    def escape(text: str) -> str:
        # Messages may quote untrusted files. Only SQL errors have several lines, which mark the position; they are
        # indented so that none looks like a separate message.
        return escaping.lines(text).replace("\n", "\n  ") if text.startswith("SQL: ") else escaping.line(text)

    print(f"error: {escape(failure.message)}{escape(f'; {failure.hint}' if failure.hint else '')}", file=sys.stderr)
    for problem in failure.problems:
        print(f"  {escape(problem)}", file=sys.stderr)
    return failure.exit_code


def classify(error: BaseException) -> Failure:
    """Turn any exception into a kind, a message, a hint and an exit code."""
    if isinstance(error, Stopped):
        return Failure(kind="Interrupted", message=str(error), exit_code=128 + error.number)
    if isinstance(error, KeyboardInterrupt):
        return Failure(kind="Interrupted", message="interrupted", exit_code=130)
    if isinstance(error, ShadowedEngine):
        return Failure(kind="ShadowedEngine", message=str(error), exit_code=2)
    if hasattr(error, "format_message"):  # raised by the option parser
        return _classify_usage(error)
    if isinstance(error, OSError) and error.errno in _MACHINE:
        where = f": '{error.filename}'" if error.filename else ""
        return Failure(
            kind=type(error).__name__,
            message=f"{error.strerror}{where}",
            hint=_MACHINE[error.errno],
            exit_code=1,
        )
    from pipelines.errors import AmagoError, StorageError

    if isinstance(error, StorageError):
        return Failure(kind="StorageError", message=f"object store: {error}", exit_code=1)
    if isinstance(error, AmagoError):
        return Failure(
            kind=type(error).__name__,
            message=error.message,
            hint=error.hint,
            problems=getattr(error, "problems", ()),
            exit_code=error.exit_code,
            result=error.result,
        )
    return Failure(kind=type(error).__name__, message=str(error), exit_code=1, expected=False)


def _classify_usage(error: Any) -> Failure:
    """Classify an error of the option parser, in our words and with a hint that says what was probably meant."""
    message = error.format_message().rstrip(".").replace(". Did you mean", "; did you mean")
    context = getattr(error, "ctx", None)
    hint = f"see `{context.command_path} --help`" if context is not None else None
    name = getattr(error, "option_name", None)
    if name and context is None:  # of an option that was given without its value
        message = message.replace("Option", "option").replace("requires an argument", "needs a value")
    elif name and context is not None:
        from pipelines.nearest import nearest

        message = f"no such option {name}"
        if close := nearest(name, getattr(error, "possibilities", None) or ()):
            hint = f"did you mean {close}?"
        word = name.removeprefix("--").removeprefix("from-").upper()
        arguments = [each.metavar or "" for each in context.command.params if each.param_type_name == "argument"]
        for metavar in arguments:
            if word in metavar.partition("[")[0].split("|"):
                hint = f"give {metavar} without {name}: {context.command_path} {metavar}"
                break
    elif extra := _EXTRA.fullmatch(message):
        message = f"unexpected argument '{extra[1]}'"
        option = _NOT_POSITIONAL.get(context.info_name) if context is not None else None
        if option is not None and not extra[1].replace(".", "").isdigit():
            hint = f"did you mean {option} {extra[1]}?"
    elif "; did you mean" in message:
        hint = None
    return Failure(
        kind="UsageError",
        message=message[:1].lower() + message[1:],
        hint=hint,
        exit_code=getattr(error, "exit_code", 2),
    )
