from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Amago


@pytest.mark.system
def test_steps_land_in_the_lake_of_a_run_named_after_the_environment(amago: Amago) -> None:
    done = amago("collect", "--env", "gym:CartPole-v1", "--steps", 100, "--actors", 4, "--output", "json")
    assert done.code == 0, done.err
    assert done.json["run"] == "runs/gym-CartPole-v1"
    assert done.json["lake"] == "runs/gym-CartPole-v1/lake"
    assert done.json["metrics"].keys() >= {"steps", "trajectories", "return_mean", "steps_per_second"}
    (row,) = amago(
        "lake", "sql", "runs/gym-CartPole-v1", "select sum(length) n from trajectories", "--output", "json"
    ).json
    assert row["n"] >= 100


@pytest.mark.system
def test_repeating_it_has_nothing_to_do_and_more_steps_extend_it(amago: Amago) -> None:
    first = ("collect", "--env", "tmaze", "--set", "env.corridor=3", "--actors", 2, "--output", "json")
    assert amago(*first, "--steps", 40).json["status"] == "done"
    assert amago(*first, "--steps", 40).json["status"] == "skipped"
    assert amago(*first, "--steps", 80).json["status"] == "done"


def test_a_changed_configuration_is_refused_with_a_diff_unless_fresh(amago: Amago) -> None:
    first = ("collect", "--env", "tmaze", "--steps", 20, "--actors", 2)
    assert amago(*first, "--set", "env.corridor=3").code == 0
    refused = amago(*first, "--set", "env.corridor=4")
    assert refused.code == 2
    assert "env.corridor: 3 -> 4" in refused.err
    assert amago(*first, "--set", "env.corridor=4", "--fresh").code == 0


def test_epsilon_is_a_constant_rate(amago: Amago) -> None:
    shown = amago("collect", "--env", "tmaze", "--epsilon", 0.25, "--dry-run", "--output", "json")
    exploration = shown.json["settings"]["exploration"]
    assert (exploration["start"], exploration["end"], exploration["randomize"]) == (0.25, 0.25, False)
    assert shown.json["settings"]["collect"]["explore"] is True


@pytest.mark.parametrize(
    ("options", "epsilon"),
    [
        ([], 0.0),
        (["--epsilon", 0.25], 0.25),
        (["--explore", "--set", "exploration.start=0.5", "--set", "exploration.randomize=false"], 0.5),
        (["--set", "exploration.start=0.5", "--set", "exploration.randomize=false"], 0.5),
    ],
)
def test_a_named_policy_explores_only_when_asked(amago: Amago, options: list[object], epsilon: float) -> None:
    expert = ("collect", "--env", "tmaze", "--policy", "expert", "--steps", 64, "--actors", 2, "--output", "json")
    done = amago(*expert, *options)
    assert done.code == 0, done.err
    assert done.json["metrics"]["epsilon"] == pytest.approx(epsilon, abs=1e-3)
    assert amago(*expert, "--run", "runs/tmaze").json["metrics"]["epsilon"] == 0.0  # whatever was asked for before


def test_a_call_that_names_no_policy_plays_at_random_again(amago: Amago) -> None:
    collect = ("collect", "--env", "tmaze", "--steps", 40, "--actors", 2, "--output", "json")
    assert amago(*collect, "--policy", "expert").json["metrics"]["policy"] == "expert"
    again = amago(*collect).json
    assert (again["status"], again["metrics"]["policy"]) == ("done", "random")


def test_adding_from_cron_collects_as_many_each_time(amago: Amago) -> None:
    cron = ("collect", "--env", "tmaze", "--lake", "shared", "--actors", 2, "--add", "1e2", "--output", "json")
    assert [amago(*cron).json["metrics"]["steps_total"] for _ in range(2)] == [100, 200]
    refused = amago(*cron, "--steps", 100)
    assert (refused.code, "--steps and --add exclude each other" in refused.err) == (2, True)


@pytest.mark.parametrize("option", ["--explore", "--no-explore"])
def test_a_constant_rate_of_exploration_excludes_a_schedule_and_none(amago: Amago, option: str) -> None:
    refused = amago("collect", "--env", "tmaze", "--epsilon", 0.1, option)
    assert (refused.code, f"--epsilon and {option} exclude each other" in refused.err) == (2, True)


def test_a_lake_where_a_file_is_says_what_to_do(amago: Amago) -> None:
    Path("taken").touch()
    refused = amago("collect", "--env", "tmaze", "--steps", 40, "--lake", "taken")
    assert refused.code == 1
    assert "a file is where a directory has to be; choose another directory" in refused.err


def test_a_target_that_is_reached_says_how_to_collect_more(amago: Amago) -> None:
    collect = ("collect", "--env", "tmaze", "--steps", "0.1k", "--actors", 2, "--lake", "shared")
    assert amago(*collect).code == 0
    again = amago(*collect)
    assert "--add N collects N more" in again.err


def test_a_lake_of_its_own_needs_no_run(amago: Amago) -> None:
    done = amago("collect", "--env", "tmaze", "--lake", "shared", "--steps", 20, "--actors", 2, "--output", "json")
    assert done.code == 0, done.err
    assert done.json["lake"] == "shared"
    assert not Path("runs").exists()


def test_a_lake_of_other_spaces_is_refused(amago: Amago, small: Path) -> None:
    refused = amago("collect", "--env", "tmaze", "--lake", small, "--steps", 20)
    assert refused.code == 3
    assert "other spaces" in refused.err
    assert "Traceback" not in refused.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "no environment given"),
        (["--env", "tmazee"], 2, "did you mean 'tmaze'"),
        (["--env", "gym:NoSuch-v0"], 2, "unknown environment 'gym:NoSuch-v0'"),
        (["--env", "nosuchmodule:Env"], 3, "nosuchmodule"),
        (["--env", "tmaze", "--steps", "0"], 2, "collect.steps"),
        (["--env", "tmaze", "--set", "env.coridor=3"], 2, "did you mean 'env.corridor'"),
        (["--env", "tmaze", "--set", "collect.step=3"], 2, "did you mean 'collect.steps'"),
        (["--env", "tmaze", "--set", "rubbish"], 2, "key=value"),
        (["--env", "tmaze", "--config", "nowhere.toml"], 3, "no configuration file 'nowhere.toml'"),
        (["--env", "tmaze", "--policy", "runs/nowhere"], 3, "runs/nowhere"),
    ],
)
def test_mistakes_are_named_without_a_traceback(amago: Amago, arguments: list[str], code: int, words: str) -> None:
    failed = amago("collect", *arguments)
    assert failed.code == code, failed.err
    assert words in failed.err
    assert "Traceback" not in failed.err


def test_every_mistake_is_listed_at_once(amago: Amago) -> None:
    Path("bad.toml").write_text("[env]\nname = 'tmaze'\ncoridor = 3\n[collect]\nsteps = 'many'\n[trian]\nsteps = 1\n")
    failed = amago("collect", "-c", "bad.toml", "--actors", "0")
    assert failed.code == 2
    problems = failed.err.splitlines()[1:]
    assert [line.split(":")[0].strip() for line in problems] == [
        "collect.steps",
        "collect.actors",
        "trian",
        "env.coridor",
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_named(amago: Amago, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    failed = amago("collect", "--env", "tmaze", "--steps", 20)
    tmp_path.chmod(0o755)
    assert failed.code == 1
    assert "Traceback" not in failed.err


def test_a_file_in_the_way_is_named(amago: Amago) -> None:
    Path("runs").write_text("")
    failed = amago("collect", "--env", "tmaze", "--steps", 20)
    assert failed.code == 1
    assert "Traceback" not in failed.err
    assert "runs" in failed.err


@pytest.mark.system
def test_sigterm_saves_and_the_same_command_goes_on(amago: Amago, tmp_path: Path) -> None:
    arguments = ["collect", "--env", "gym:CartPole-v1", "--steps", "200000", "--actors", "4", "--output", "json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(
        [sys.executable, "-m", "amago_cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    while not list((tmp_path / "runs").glob("*/lake/wal/*")):
        assert process.poll() is None, process.communicate()
    process.terminate()
    out, err = process.communicate()
    assert process.returncode == 143, err
    assert '"status": "interrupted"' in out
    assert "Traceback" not in err
    assert amago(*arguments[:4], 100, *arguments[5:]).code == 0


def test_an_option_and_a_setting_of_the_table_it_decides_are_refused_together(amago: Amago) -> None:
    refused = amago("collect", "--env", "tmaze", "--epsilon", 0.3, "--set", "exploration.kind=bilevel")
    assert refused.code == 2
    assert "exploration.kind: given twice" in refused.err


@pytest.mark.system
def test_what_breaks_stops_or_is_begun_anew_as_wished(amago: Amago) -> None:
    walk = ("collect", "--env", "tests.envs.breaking:Walk", "-s", "env.fault=raise", "-s", "env.every=9")
    how = ("--actors", 4, "--workers", 0, "--steps", 400, "--output", "json")
    stopped = amago(*walk, *how, "--run", "a")
    assert stopped.code == 1
    assert "failed in step" in stopped.err
    assert "it broke" in stopped.json["error"]["message"]
    metrics = stopped.json["metrics"]
    assert (metrics["env_errors"], metrics["episodes_dropped"]) == (1, 1)
    (row,) = amago("lake", "sql", "a", "select sum(length) n from trajectories", "--output", "json").json
    assert row["n"] == metrics["steps"] > 0
    again = amago(*walk, *how, "--run", "a", "--on-env-error", "restart")
    assert again.code == 0, again.err
    assert again.json["metrics"]["steps_total"] >= 400
    assert again.json["metrics"]["env_errors"] > 0
    assert "warning: environment 'tests.envs.breaking:Walk' failed in step" in again.err
    (row,) = amago("lake", "sql", "a", "select sum(length) n from trajectories", "--output", "json").json
    assert row["n"] == again.json["metrics"]["steps_total"]


@pytest.mark.system
def test_a_step_that_takes_longer_than_it_may_stops_as_what_breaks(amago: Amago) -> None:
    hanging = ("collect", "--env", "tests.envs.breaking:Walk", "-s", "env.fault=hang", "--steps", 400, "--actors", 2)
    limited = (*hanging, "--run", "a", "--env-timeout", 0.2)
    assert "collect.workers = 0" in amago(*limited, "--workers", 0).err
    stopped = amago(*limited, "--workers", 1)
    assert stopped.code == 1
    assert "took longer than 0.2 s for a step or a reset" in stopped.err
    refused = amago("collect", "--from", "npz:.", "--env-timeout", 3)
    assert (refused.code, "--env-timeout" in refused.err) == (2, True)


@pytest.mark.system
def test_what_cannot_begin_leaves_nothing_behind(amago: Amago) -> None:
    failed = amago("collect", "--env", "tests.envs.own:Line", "-s", "env.fault=reset", "--run", "a", "--workers", 0)
    assert failed.code == 1
    assert "cannot begin" in failed.err
    assert not Path("a/config.toml").exists()
    assert not Path("a/lake").exists()


def test_a_count_is_a_number_or_auto(amago: Amago) -> None:
    refused = amago("collect", "--env", "tmaze", "--workers", "two", "--actors", "0", "--on-env-error", "ignore")
    assert refused.code == 2
    assert "collect.workers: input should be a whole number from 0 to 1024, or 'auto', got 'two'" in refused.err
    assert "collect.actors: input should be a whole number from 1 to 65536" in refused.err
    assert "collect.on_env_error: input should be 'stop' or 'restart'" in refused.err


@pytest.mark.system
def test_the_number_of_actors_is_fixed_when_a_run_begins(amago: Amago) -> None:
    first = ("collect", "--env", "tmaze", "-s", "env.corridor=3", "--run", "a", "--output", "json")
    assert amago(*first, "--steps", 128).json["metrics"]["actors"] == 16
    longer = amago(*first, "--steps", 20_000)
    assert longer.code == 0, longer.err
    assert longer.json["metrics"]["actors"] == 16
    assert "actors = 16" in Path("a/config.toml").read_text()
