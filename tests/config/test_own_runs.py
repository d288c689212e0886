"""A run's own modules: what the user typed when it was made is not asked for again, and nobody else gains trust."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomli_w

from pipelines.config import own_runs
from pipelines.config.run_directory import RunDirectory
from tests.cli.conftest import Amago, amago, tiny  # noqa: F401
from tests.test_trust import set_config

MINE = """
from pathlib import Path
import gymnasium
import numpy as np
Path(__file__).with_name(f"{__name__}.imported").touch()


class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=5):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(2, np.float32), 1.0, self.time >= self.length, False, {}
"""
SEEDS = itertools.count()


@pytest.fixture
def mine(amago: Amago, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:  # noqa: F811
    """A run of the user's own environment, whose module is in the current directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(Path.cwd()))])
    Path("own_module.py").write_text(MINE)
    words = ("--env", "own_module:Mine", "--run", "runs/mine", "--steps", 40, "--actors", 2, "--workers", 0)
    assert amago("collect", *words).code == 0
    trained = amago("train", "--from-lake", "runs/mine", "--steps", 2, "--encoder", "feedforward", *tiny())
    assert trained.code == 0, trained.err
    forget_import()
    yield Path("runs/mine")
    forget_import()


def forget_import() -> None:
    sys.path[:] = [folder for folder in sys.path if not (Path(folder) / "own_module.py").exists()]
    for name in ("own_module", "evil"):
        sys.modules.pop(name, None)
        Path(f"{name}.imported").unlink(missing_ok=True)


def evaluate(amago: Amago, run: Path | str = "runs/mine") -> tuple[int, bool]:  # noqa: F811
    """Evaluate a run; return the exit code and whether a module of the current directory was imported."""
    forget_import()
    other = ("--seed", next(SEEDS))  # than an evaluation that is stored
    code = amago("evaluate", run, "--episodes", 2, "--set", "collect.workers=0", *other).code
    return code, any(Path().glob("*.imported"))


def record_of(run: Path) -> Path:
    return own_runs.OwnRun(run, {}).record


@pytest.mark.system
def test_an_own_run_is_evaluated_and_extended_without_being_asked(amago: Amago, mine: Path) -> None:  # noqa: F811
    assert evaluate(amago) == (0, True)
    assert evaluate(amago, mine.resolve()) == (0, True)
    forget_import()
    assert amago("collect", "--run", mine, "--add", 10, "--workers", 0).code == 0
    assert amago("train", "--from-lake", mine, "--steps", 3).code == 0
    assert evaluate(amago) == (0, True)


def copy(run: Path) -> Path:
    return Path(shutil.copytree(run, "runs/copy", symlinks=True))


def move(run: Path) -> Path:
    return run.rename("runs/moved")


def replace_by_a_copy(run: Path) -> Path:
    """Another directory at the same path, every byte alike."""
    copied = copy(run)
    shutil.rmtree(run)
    return copied.rename(run)


def forge_in_place(run: Path) -> Path:
    """Files as of an archive that is unpacked over the run, with its id: they name a module that was not typed."""
    Path("evil.py").write_text(MINE)
    set_config(run, "env.name", "evil:Mine")
    return run


def forge_as_a_copy(run: Path) -> Path:
    """A foreign run that claims to be this one."""
    forged = copy(run)
    record = json.loads((run / "run.json").read_text())
    (forged / "run.json").write_text(json.dumps(record | {"path": str(run.resolve())}))
    return forged


def change_parameters(run: Path) -> Path:
    set_config(run, "env.length", 7)
    return run


def change_options_of_the_agent(run: Path) -> Path:
    set_config(run, "agent.reward_scale", 2.0)
    return run


def change_id(run: Path) -> Path:
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"id": "00000000"}))
    return run


def remove_run_record(run: Path) -> Path:
    (run / "run.json").unlink()
    return run


def damage_own_record(run: Path) -> Path:
    record_of(run).write_bytes(b"\x00{")
    return run


def forge_types_of_own_record(run: Path) -> Path:
    record_of(run).write_text(json.dumps({"path": 1, "modules": []}))
    return run


def let_others_write_own_record(run: Path) -> Path:
    record_of(run).chmod(0o666)
    return run


def let_others_write_the_directory(run: Path) -> Path:
    record_of(run).parent.chmod(0o777)
    return run


def link_own_record(run: Path) -> Path:
    """The record is a link to a file in the run, as an archive with links might try."""
    record_of(run).rename(run / "own.json")
    record_of(run).symlink_to((run / "own.json").resolve())
    return run


def put_record_into_the_run(run: Path) -> Path:
    """A record that comes with the run has no effect: it is looked for outside."""
    inside = run / "amago" / "own_runs"
    inside.mkdir(parents=True)
    record_of(run).rename(inside / record_of(run).name)
    return run


ATTACKS = (
    copy,
    move,
    replace_by_a_copy,
    forge_in_place,
    forge_as_a_copy,
    change_parameters,
    change_options_of_the_agent,
    change_id,
    remove_run_record,
    damage_own_record,
    forge_types_of_own_record,
    let_others_write_own_record,
    let_others_write_the_directory,
    link_own_record,
    put_record_into_the_run,
)


@pytest.mark.system
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_no_other_run_gains_trust(amago: Amago, mine: Path, attack: Callable[[Path], Path]) -> None:  # noqa: F811
    assert evaluate(amago, attack(mine)) == (3, False)


@pytest.mark.system
def test_another_module_of_that_name_is_not_imported(amago: Amago, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """In another directory the name means another file."""
    Path("elsewhere").mkdir()
    shutil.copy("own_module.py", "elsewhere/own_module.py")
    monkeypatch.chdir("elsewhere")
    assert evaluate(amago, mine.absolute().parents[2] / "runs/mine") == (3, False)


@pytest.mark.system
def test_a_record_of_another_user_is_not_believed(
    amago: Amago,  # noqa: F811
    mine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert evaluate(amago) == (3, False)


@pytest.mark.system
def test_trust_that_was_given_once_is_not_remembered(amago: Amago, mine: Path) -> None:  # noqa: F811
    copied = copy(mine)
    more = ("collect", "--run", copied, "--add", 10, "--workers", 0)
    forget_import()
    assert amago(*more).code == 3
    assert amago(*more, "--trust").code == 3, "a module in the current directory that a file names is not found"
    sys.path.append(os.curdir)
    assert amago(*more, "--trust").code == 0
    sys.path.remove(os.curdir)
    assert not record_of(copied).exists()


@pytest.mark.system
def test_a_checkpoint_of_an_own_run_cannot_name_other_modules(amago: Amago, mine: Path) -> None:  # noqa: F811
    from tests.test_trust import set_checkpoint

    Path("evil.py").write_text(MINE)
    set_checkpoint(mine, kind="evil:Mine")
    forget_import()
    assert evaluate(amago)[0] == 3
    assert not Path("evil.imported").exists()


def test_a_run_without_modules_leaves_no_record(amago: Amago, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # noqa: F811
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert amago("collect", "--env", "bandit", "--run", "plain", "--steps", 40, "--actors", 2).code == 0
    assert not record_of(Path("plain")).exists()


@pytest.mark.system
def test_a_state_directory_that_cannot_be_written_is_no_obstacle(
    amago: Amago,  # noqa: F811
    mine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(Path("file").absolute()))
    words = ("--env", "own_module:Mine", "--run", "runs/other", "--steps", 20, "--actors", 2, "--workers", 0)
    assert amago("collect", *words).code == 0
    assert evaluate(amago, "runs/other")[0] == 3


@pytest.mark.system
@pytest.mark.parametrize("content", ["", "[", "x = 1", tomli_w.dumps({"env": {"name": "own_module:Mine"}})])
def test_a_configuration_that_was_replaced_gains_nothing(amago: Amago, mine: Path, content: str) -> None:  # noqa: F811
    RunDirectory(mine).config_path.write_text(content)
    code, imported = evaluate(amago)
    assert code != 0
    assert not imported
