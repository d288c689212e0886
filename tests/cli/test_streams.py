"""Standard streams that are closed, full, or in an encoding without the characters we draw with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Amago
from tests.tiers import some

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NOISY = """
import os, sys, gymnasium

class Noisy(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    time = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        print("hello from reset")
        os.write(1, b"hello from C\\n")
        return self.observation_space.sample(), {}

    def step(self, action):
        self.time += 1
        print("hello from step")
        return self.observation_space.sample(), 1.0, self.time % 5 == 0, False, {}
"""


def shell(line: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    line = line.replace("amago", f"{sys.executable} -P -m amago_cli")
    names = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", **environment}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, env=names, cwd=tmp_path)


@pytest.mark.parametrize("closed", some([">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full"], 3, 4))
def test_collecting_does_not_need_somebody_who_reads(tmp_path: Path, amago: Amago, closed: str) -> None:
    done = shell(f"amago collect --env gym:CartPole-v1 --lake lake --steps 40 --actors 1 {closed}", tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    info = amago("lake", "info", "lake", "--output", "json").json["metrics"]
    assert info["steps"] == 40
    assert amago("lake", "verify", "lake").code == 0  # no line went into a file of the lake


@pytest.mark.parametrize("arguments", ["lake info nothing", "lake info small"])
def test_closed_streams_keep_the_exit_code(small: Path, tmp_path: Path, arguments: str) -> None:
    for closed in (">&-", "2>&-", "2>/dev/full"):
        done = shell(f"amago {arguments} {closed}", tmp_path)
        assert (done.returncode, "Traceback" in done.stderr) == (3 if "nothing" in arguments else 0, False)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_full_device_is_one_line(small: Path, tmp_path: Path, form: str) -> None:
    done = shell(f"amago lake info small --output {form} >/dev/full", tmp_path)
    assert done.returncode == 1
    assert [line[:30] for line in done.stderr.splitlines()] == ["error: No space left on device"]


def test_a_locale_without_our_characters_shows_others(small: Path, tmp_path: Path) -> None:
    for command in ("lake info small", "examples", "lake sample small", "envs"):
        done = shell(f"amago {command}", tmp_path, **ASCII)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.isascii()
        assert "\\u" not in done.stdout
    assert "\n--" in shell("amago lake info small", tmp_path, **ASCII).stdout


def test_a_locale_without_our_characters_gives_json_all_the_same(small: Path, tmp_path: Path) -> None:
    for more in ({}, ASCII):
        done = shell(
            """amago lake sql small "select chr(233) || chr(9472) || chr(128578) as text" --output json""",
            tmp_path,
            **more,
        )
        assert json.loads(done.stdout) == [{"text": "é─🙂"}]


def test_a_run_named_in_utf8_is_read_in_any_locale(small: Path, tmp_path: Path) -> None:
    (tmp_path / "small").rename(tmp_path / "größe")
    record = tmp_path / "größe" / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "name": "größe"}, ensure_ascii=False), "utf-8")
    for command in ("lake lineage", "lake info", "runs"):
        done = shell(f"amago {command} gr*", tmp_path, **ASCII)
        assert (done.returncode, done.stderr) == (0, ""), command


def test_what_an_environment_prints_is_not_in_the_result(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    done = shell(
        "amago collect --env noisy:Noisy --lake lake --steps 20 --actors 2 -s collect.workers=0 --output json", tmp_path
    )
    assert json.loads(done.stdout)["metrics"]["steps"] == 20
    assert "hello from step" in done.stderr
    assert "hello from C" in done.stderr
