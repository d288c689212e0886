from __future__ import annotations

import errno
import io
import sys

import pytest

from amago_cli.errors import classify, report
from amago_cli.invocation import Invocation
from pipelines import errors
from pipelines.stages.result import Result


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.StageFailed("x"), 1),
        (errors.UsageError("x"), 2),
        (errors.InputMissing("x"), 3),
        (errors.IntegrityError("x"), 4),
        (errors.RequirementNotMet("x"), 5),
        (errors.Locked("x"), 75),
        (errors.Interrupted("x", signal_number=2), 130),
        (errors.Interrupted("x", signal_number=15), 143),
        (KeyboardInterrupt(), 130),
        (OSError(errno.ENOSPC, "No space left on device"), 1),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1),
    ],
)
def test_expected_errors_have_their_code_and_no_traceback(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error, Invocation()) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert "Traceback" not in shown.err


def test_what_where_next_step_and_every_problem(capsys: pytest.CaptureFixture[str]) -> None:
    report(errors.UsageError("2 errors", hint="look", problems=("a: wrong", "b: wrong")), Invocation())
    assert capsys.readouterr().err.splitlines() == ["error: 2 errors; look", "  a: wrong", "  b: wrong"]


def test_what_went_wrong_besides_is_shown_below(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (errors.StageFailed("first"), OSError(errno.EROFS, "first")):
        error.add_note("and then: second")
        report(error, Invocation())
        assert capsys.readouterr().err.splitlines()[-1] == "  and then: second"


def test_a_bug_shows_its_traceback_and_verbose_shows_every(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(ZeroDivisionError("oh"), Invocation()) == 1
    assert "Traceback" not in capsys.readouterr().out
    report(errors.UsageError("x"), Invocation(verbose=True))
    assert "UsageError" in capsys.readouterr().err


def test_an_unknown_os_error_is_a_bug() -> None:
    assert not classify(OSError(errno.EINVAL, "Invalid argument")).expected
    assert classify(OSError(errno.EROFS, "Read-only file system", "/x")).message == "Read-only file system: '/x'"


def test_json_names_the_error_and_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    error = errors.RequirementNotMet("return_mean is 3", hint="train longer")
    error.result = Result(command="evaluate", metrics={"return_mean": 3.0})
    report(error, Invocation(command="evaluate", json=True))
    import json

    shown = json.loads(capsys.readouterr().out)
    assert shown["metrics"] == {"return_mean": 3.0}
    assert shown["error"] == {
        "type": "RequirementNotMet",
        "message": "return_mean is 3",
        "hint": "train longer",
        "problems": [],
        "exit_code": 5,
    }


def test_an_interruption_has_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    report(errors.Interrupted("x", signal_number=15), Invocation(json=True))
    assert '"status": "interrupted"' in capsys.readouterr().out


def test_a_bug_prints_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    try:
        raise ZeroDivisionError("oh")
    except ZeroDivisionError as error:
        report(error, Invocation())
    assert "Traceback" in stream.getvalue()
    assert stream.getvalue().endswith("error: oh\n")
