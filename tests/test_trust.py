"""Files of others name modules; only names that the user typed are imported. Every reader meets a hostile file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from pipelines import trust
from pipelines.config.run_directory import RunDirectory
from pipelines.errors import InputMissing
from pipelines.export.policy_bundle import load_policy
from pipelines.files.checksums import read_sealed, seal
from pipelines.registry import Registry
from tests.cli.conftest import Amago, _prepared, amago, small, tiny  # noqa: F401
from tests.tiers import crossed, some

EVIL = """
from pathlib import Path
import gymnasium
Path(__file__).with_name("executed").touch()

class Anything(gymnasium.Env):
    def __init__(self, *arguments, **options):
        Path(__file__).with_name("called").touch()
"""


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that is there once the module `evil` was imported."""
    home = tmp_path / "site"
    home.mkdir()
    (home / "evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(home)
    yield home / "executed"
    sys.modules.pop("evil", None)


def set_config(run: Path, key: str, value: Any) -> None:
    document = RunDirectory(run).load_document()
    *tables, last = key.split(".")
    table = document
    for name in tables:
        table = table.setdefault(name, {})
    table[last] = value
    (run / "config.toml").write_text(tomli_w.dumps(document))


def reseal(path: Path, agent: dict[str, Any], **more: Any) -> None:
    """Change the agent of a record; its author makes the checksums fit."""
    record = read_sealed(path)
    files = {name: (path.parent / name).read_bytes() for name in record["files"]}
    path.write_bytes(seal(record | {"agent": record["agent"] | agent} | more, files))


def set_checkpoint(run: Path, **agent: Any) -> None:
    for path in (run / "checkpoints").glob("*/checkpoint.json"):
        reseal(path, agent)


ENCODER = {"kind": "evil:Anything", "options": {}}
AGENTS: list[dict[str, Any]] = [
    {"kind": "evil:Anything"},
    {"sequence": ENCODER},
    {"filter": {"kind": "evil:Anything"}},
    {"auxiliary_losses": [{"kind": "evil:Anything"}]},
]
ACTING = ["--env", "gym:CartPole-v1", "--lake", "new", "--steps", 20, "--actors", 1]
READERS_OF_POLICIES = (
    ["evaluate", "small", "--episodes", 1],
    ["collect", *ACTING, "--policy", "small"],
    ["collect", *ACTING, "--follow", "small"],
    ["lake", "sample", "small", "--values", "small"],
)
READERS_OF_BUNDLES = (["evaluate", "eb", "--episodes", 1], ["collect", *ACTING, "--policy", "eb"])
ENVIRONMENTS = ("evil:Anything", "gym:evil:Anything-v0")
WORKERS = (0, pytest.param(2, marks=pytest.mark.system))


def named(value: Any) -> str:
    """Name a case by a command, or by what an agent has of its own."""
    return next(iter(value)) if isinstance(value, dict) else " ".join(map(str, value))


def require_trust_is_asked_for(amago: Amago, command: list[Any], executed: Path) -> None:  # noqa: F811
    """The command imports nothing and asks for --trust, with which it imports."""
    refused = amago(*command)
    assert (refused.code, executed.exists()) == (3, False), refused.err
    assert "'evil'" in refused.err
    assert "--trust" in refused.err
    amago(*command, "--trust")  # it may well fail later
    assert executed.exists()


@pytest.mark.system
@pytest.mark.parametrize(("command", "agent"), crossed(READERS_OF_POLICIES, AGENTS), ids=named)
def test_a_checkpoint_imports_nothing(
    amago: Amago,  # noqa: F811
    small: Path,  # noqa: F811
    executed: Path,
    command: list[Any],
    agent: dict[str, Any],
) -> None:
    set_checkpoint(small, **agent)
    require_trust_is_asked_for(amago, command, executed)


@pytest.mark.system
@pytest.mark.parametrize("agent", some(AGENTS, 0), ids=named)
def test_a_report_imports_nothing(
    amago: Amago,  # noqa: F811
    small: Path,  # noqa: F811
    executed: Path,
    agent: dict[str, Any],
) -> None:
    set_checkpoint(small, **agent)
    set_config(small, "agent.kind", "evil:Anything")
    assert amago("report", small, "--episodes", 1).code == 0
    page = (small / "report.html").read_text()
    assert "Without the agent&#x27;s values" in page
    assert "--trust" in page
    assert not executed.exists()
    amago("report", small, "--trust")
    assert executed.exists()


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("command", [["evaluate", "small", "--episodes", 2], ["collect", "--run", "small"]])
def test_a_run_s_environment_imports_nothing(
    amago: Amago,  # noqa: F811
    small: Path,  # noqa: F811
    executed: Path,
    name: str,
    workers: int,
    command: list[Any],
) -> None:
    set_config(small, "env.name", name)
    if command[0] == "collect":
        set_config(small, "collect.steps", 500)
    words = [*command, "--set", f"collect.workers={workers}", "--fresh"]
    refused = amago(*(words if command[0] == "collect" else words[:-1]))
    assert (refused.code, executed.exists()) == (3, False), refused.err
    assert "'evil'" in refused.err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("exploration.kind", "evil:Anything"),
        ("source.name", "evil:Anything"),
    ],
)
def test_what_collects_is_not_imported_from_a_run(
    amago: Amago,  # noqa: F811
    small: Path,  # noqa: F811
    executed: Path,
    key: str,
    value: str,
) -> None:
    set_config(small, key, value)
    acting = ["--explore"] if key.startswith("exploration") else []
    refused = amago("collect", "--run", "small", "--env", "gym:CartPole-v1", "--fresh", *acting)
    assert (refused.code, executed.exists()) == (3, False), refused.err


def test_the_policy_that_collects_is_named_by_the_command_alone(
    amago: Amago,  # noqa: F811
    small: Path,  # noqa: F811
    executed: Path,
) -> None:
    set_config(small, "collect.policy", "evil:Anything")
    done = amago("collect", "--run", "small", "--env", "gym:CartPole-v1", "--fresh")
    assert (done.code, executed.exists()) == (0, False), done.err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("agent.kind", "evil:Anything"),
        ("agent.sequence", ENCODER),
        ("agent.filter.kind", "evil:Anything"),
        ("agent.auxiliary_losses", [{"kind": "evil:Anything"}]),
        ("train.relabel", {"relabeler": ["evil:Anything"]}),
        ("train.relabel", {"relabeler": ["reward:evil:Anything"]}),
    ],
)
def test_what_trains_is_not_imported_from_a_run(
    amago: Amago,  # noqa: F811
    small: Path,  # noqa: F811
    executed: Path,
    key: str,
    value: Any,
) -> None:
    set_config(small, key, value)
    refused = amago("train", "--from-lake", "small", "--fresh")
    assert (refused.code, executed.exists()) == (3, False), refused.err
    assert "'evil'" in refused.err


@pytest.mark.parametrize("value", ["evil:Anything", "reward:evil:Anything", "task:evil:Anything"])
def test_relabelers_are_not_imported_from_a_run(amago: Amago, small: Path, executed: Path, value: str) -> None:  # noqa: F811
    set_config(small, "relabel.relabeler", value)
    refused = amago("relabel", "--from-lake", "small")
    assert (refused.code, executed.exists()) == (3, False), refused.err


def test_goal_rules_are_not_imported_from_a_run(amago: Amago, small: Path, executed: Path) -> None:  # noqa: F811
    set_config(small, "relabel.goal.rule", "evil:Anything")
    refused = amago("relabel", "--from-lake", "small", "--with", "hindsight")
    assert (refused.code, executed.exists()) == (3, False), refused.err


@pytest.mark.parametrize("agent", AGENTS[:2], ids=lambda agent: next(iter(agent)))
def test_a_bundle_imports_nothing(amago: Amago, small: Path, executed: Path, agent: dict[str, Any]) -> None:  # noqa: F811
    assert amago("export", "small", "--to", "eb").code == 0
    reseal(Path("eb/policy.json"), agent)
    with pytest.raises(InputMissing, match=r"'evil'.*--trust"):
        load_policy("eb")
    assert not executed.exists()
    with pytest.raises(Exception):  # noqa: B017, PT011 - it is no encoder
        load_policy("eb", trust=True)
    assert executed.exists()


@pytest.mark.parametrize(("command", "agent"), crossed(READERS_OF_BUNDLES, AGENTS[:2]), ids=named)
def test_acting_with_a_bundle_imports_nothing(
    amago: Amago,  # noqa: F811
    small: Path,  # noqa: F811
    executed: Path,
    command: list[Any],
    agent: dict[str, Any],
) -> None:
    assert amago("export", "small", "--to", "eb").code == 0
    Path("eb/policy.py").write_text("open('acted', 'w')")
    reseal(Path("eb/policy.json"), agent)
    require_trust_is_asked_for(amago, command, executed)
    assert not Path("acted").exists()


@pytest.mark.system
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_bundle_s_environment_imports_nothing(amago: Amago, small: Path, executed: Path, name: str) -> None:  # noqa: F811
    assert amago("export", "small", "--to", "eb").code == 0
    reseal(Path("eb/policy.json"), {}, env={"name": name})
    refused = amago("evaluate", "eb", "--episodes", 1)
    assert (refused.code, executed.exists()) == (3, False), refused.err
    assert amago("evaluate", "eb", "--episodes", 1, "--env", "gym:CartPole-v1").code == 0
    amago("evaluate", "eb", "--episodes", 1, "--trust")
    assert executed.exists()


@pytest.mark.system
def test_what_is_typed_is_imported(amago: Amago, small: Path, executed: Path) -> None:  # noqa: F811
    amago("evaluate", "small", "--env", "evil:Anything", "--episodes", 1)
    assert executed.exists()


@pytest.mark.system
def test_what_a_recipe_names_is_imported(amago: Amago, executed: Path) -> None:  # noqa: F811
    Path("mine.toml").write_text('env.name = "evil:Anything"\n[[stages]]\nstage = "collect"\n')
    amago("run", "mine.toml")
    assert executed.exists()


def test_a_run_whose_environment_is_unknown_can_be_trained_on(amago: Amago, small: Path, executed: Path) -> None:  # noqa: F811
    """Learning needs the lake alone."""
    set_config(small, "env.name", "evil:Anything")
    done = amago("train", "--from-lake", "small", "--run", "other", "--steps", 1, *tiny())
    assert done.code == 0, done.err
    assert not executed.exists()


def test_a_name_counts_as_typed_only_as_a_whole() -> None:
    with trust.only(["--with", "reward:mine:value", "myevil:f", "evil:fg", "x.evil:f"]):
        trust.require("function", "mine:value")
        with pytest.raises(InputMissing):
            trust.require("function", "evil:f")


def test_entry_points_and_built_ins_need_no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Registry("agent", {"a": "json:loads"})
    point = type("Point", (), {"name": "theirs", "value": "json:dumps"})
    monkeypatch.setattr(Registry, "_entry_points", [point])
    with trust.only([]):
        assert (found.get("a"), found.get("theirs"), found.get("json:dumps")) == (json.loads, json.dumps, json.dumps)


@pytest.fixture
def here(amago: Amago, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:  # noqa: F811
    """A file that is there once the module `evil` of the current directory was imported."""
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(Path.cwd()))])
    Path("evil.py").write_text(EVIL)
    yield Path("executed")
    sys.modules.pop("evil", None)


@pytest.mark.system
@pytest.mark.parametrize("workers", WORKERS)
def test_a_typed_module_is_found_in_the_current_directory(amago: Amago, here: Path, workers: int) -> None:  # noqa: F811
    before = list(sys.path)
    amago("collect", "--env", "evil:Anything", "--steps", 1, "--actors", 2, "--workers", workers)
    assert here.exists()
    assert sys.path == [*before, str(Path.cwd())], "installed modules come first"


@pytest.mark.system
def test_a_module_that_a_run_names_is_not_found_in_the_current_directory(
    amago: Amago,  # noqa: F811
    small: Path,  # noqa: F811
    here: Path,
) -> None:
    set_config(small, "env.name", "evil:Anything")
    for words in ([], ["--trust"]):
        assert amago("evaluate", "small", "--episodes", 1, *words).code == 3
    assert not here.exists()
    assert str(Path.cwd()) not in sys.path


@pytest.mark.system
def test_the_current_directory_is_not_searched_for_a_module_that_is_not_in_it(amago: Amago) -> None:  # noqa: F811
    before = list(sys.path)
    refused = amago("collect", "--env", "nowhere_to_be_found:Thing")
    assert (refused.code, sys.path) == (3, before)
    assert "in the current directory" in refused.err
