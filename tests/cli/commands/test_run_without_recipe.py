"""`amago run --env ENV` without a recipe."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from pipelines import load_policy, run
from pipelines.config.load import read_toml
from tests.cli.conftest import Amago
from tests.tiers import some

SMALL = ("--steps", 300, "--set", "collect.workers=0")


@pytest.fixture
def own(amago: Amago, monkeypatch: pytest.MonkeyPatch) -> Amago:
    """A module of the current directory."""
    Path("sorter.py").write_text((Path(__file__).parents[1] / "sorter.py").read_text())
    monkeypatch.delitem(sys.modules, "sorter", raising=False)
    return amago


def stored(run: str) -> dict:
    return json.loads((Path(run) / "run.json").read_text())


@pytest.mark.system
def test_a_budget_in_steps_is_used_up_and_the_same_command_has_nothing_left_to_do(amago: Amago) -> None:
    done = amago("run", "--env", "tmaze", *SMALL, "--set", "env.corridor=3", "--output", "json")
    assert done.code == 0, done.err
    assert (done.json["status"], done.json["run"]) == ("done", "runs/tmaze")
    assert done.json["metrics"]["steps"] >= 300
    assert done.json["metrics"]["updates"] > 0
    assert "random play: return" in done.err
    assert "train.context_length" in done.err
    assert read_toml(Path("runs/tmaze/config.toml"))["env"]["corridor"] == 3
    again = amago("run", "--env", "tmaze", *SMALL, "--set", "env.corridor=3", "--output", "json")
    assert (again.code, again.json["status"]) == (0, "skipped")
    assert "measure" not in again.err


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["--steps", 301], "--steps 300 -> --steps 301"),
        (["--minutes", 1], "--steps 300 -> --minutes 1"),
        ([*SMALL, "--set", "env.corridor=4"], "env.corridor: 3 -> 4"),
        ([*SMALL], "env.corridor: 3 -> (not given)"),
        ([*SMALL, "--set", "env.corridor=3", "--set", "train.batch_size=3"], "train.batch_size"),
        ([*SMALL, "--set", "env.corridor=3", "--seed", 5], "seed: 0 -> 5"),
    ],
)
def test_another_command_on_the_same_run_is_refused_with_the_difference(planned: Amago, changed, words: str) -> None:
    refused = planned("run", "--env", "tmaze", *changed)
    assert refused.code == 2, refused.err
    assert words in refused.err
    assert refused.err.count("--fresh") == 1


@pytest.fixture
def planned(amago: Amago) -> Amago:
    """A run that has begun: its plan is recorded, and nothing else was done."""
    from pipelines.config.load import merge, resolve
    from pipelines.config.run_directory import RunDirectory
    from pipelines.rollout.environment import find_env_model
    from pipelines.stages.choices import Budget
    from pipelines.stages.make_recipe import make_recipe

    given = {"env": {"name": "tmaze", "corridor": 3}, "collect": {"workers": 0}}

    def settings(document):
        return resolve(merge(document, given), env_model=find_env_model)

    made = make_recipe(settings, given, Budget(steps=300))
    RunDirectory("runs/tmaze").record("run", settings(made.document), recipe=made.record(given))
    return amago


@pytest.mark.system
def test_a_recipe_without_stages_is_completed_and_named_by_its_file(amago: Amago) -> None:
    Path("mine.toml").write_text('[env]\nname = "tmaze"\ncorridor = 3\n[train]\nbatch_size = 5\n')
    words = ("run", "mine.toml", *SMALL, "--output", "json")
    done = amago(*words)
    assert (done.code, done.json["run"]) == (0, "runs/mine"), done.err
    config = read_toml(Path("runs/mine/config.toml"))
    assert (config["env"]["corridor"], config["train"]["batch_size"]) == (3, 5)
    assert {entry["stage"] for entry in config["stages"]} == {"collect", "train", "evaluate"}
    assert amago(*words).json["status"] == "skipped"
    Path("mine.toml").write_text('[env]\nname = "tmaze"\ncorridor = 3\n')
    refused = amago(*words)
    assert (refused.code, "train.batch_size: 5 -> (not given)" in refused.err) == (2, True)
    assert run("mine.toml", "b", steps=300, settings={"collect.workers": 0}).status == "done"


@pytest.mark.system
def test_a_recipe_names_its_budget(amago: Amago) -> None:
    """What a run records of such a recipe: its name, its profile, and what the user changed in it."""
    text = 'minutes = 90\n[env]\nname = "tmaze"\ncorridor = 3\n[collect]\nworkers = 0\n'
    Path("mine.toml").write_text(text + "[profiles.short]\nminutes = 0.05\ntrain = { batch_size = 5 }\n")
    words = ("run", "mine.toml", "--profile", "short", "--output", "json")
    shown = amago(*words, "--minutes", 0.1, "--dry-run").json
    assert (shown["budget"], shown["settings"]["minutes"]) == ({"minutes": 0.1}, 0.1)
    done = amago(*words, "--set", "agent.n_step=2")
    assert (done.code, done.json["run"]) == (0, "runs/mine-short"), done.err
    recipe = stored("runs/mine-short")["recipe"]
    assert recipe["plan"]["budget"] == {"minutes": 0.05}
    assert (recipe["name"], recipe["profile"], recipe["changed"]) == ("mine", "short", {"agent.n_step": [None, 2]})
    assert amago(*words, "--set", "agent.n_step=2").json["status"] == "skipped"
    refused = amago(*words, "--set", "agent.n_step=2", "--minutes", 1)
    assert (refused.code, "--minutes 0.05 -> --minutes 1" in refused.err) == (2, True)
    again = amago("run", "runs/mine-short/config.toml", "--run", "again", "--dry-run", "--output", "json").json
    assert again["settings"]["stages"] == tomllib.loads(Path("runs/mine-short/config.toml").read_text())["stages"]
    called = run("mine.toml", "b", profile="short", settings={"agent.n_step": 2})
    assert (called.status, stored("b")["recipe"]["changed"]) == ("done", recipe["changed"])


@pytest.mark.system
def test_fresh_measures_and_begins_again(planned: Amago) -> None:
    done = planned("run", "--env", "tmaze", "--steps", 200, "--set", "collect.workers=0", "--fresh", "--output", "json")
    assert (done.code, done.json["status"]) == (0, "done")
    assert stored("runs/tmaze")["recipe"]["plan"]["budget"] == {"steps": 200}


def test_a_dry_run_shows_each_choice_with_its_reason_and_is_a_recipe(amago: Amago) -> None:
    shown = amago("run", "--env", "tmaze", *SMALL, "--dry-run")
    assert shown.code == 0, shown.err
    assert not Path("runs").exists()
    lines = shown.out.splitlines()
    assert lines[0] == "# run would write run: runs/tmaze"
    (actors,) = [line for line in lines if line.startswith("# collect.actors")]
    assert len(actors.split()) > 3
    document = tomllib.loads(shown.out)
    assert document["env"]["name"] == "tmaze"
    assert {entry["stage"] for entry in document["stages"]} == {"collect", "train", "evaluate"}
    Path("mine.toml").write_text(shown.out)
    assert amago("run", "mine.toml", "--dry-run").code == 0


def test_a_dry_run_in_json_has_the_choices_and_what_was_measured(amago: Amago) -> None:
    shown = amago("run", "--env", "tmaze", *SMALL, "--set", "train.batch_size=3", "--dry-run", "--output", "json").json
    rows = {row["setting"]: row for row in shown["choices"]}
    assert rows["train.batch_size"] == {
        "setting": "train.batch_size",
        "value": 3,
        "reason": "as you gave it",
        "given": True,
    }
    assert rows["epochs"]["value"] == shown["settings"]["epochs"]
    assert shown["measured"]["horizon"] == 11
    assert shown["budget"] == {"steps": 300}


@pytest.mark.system
def test_minutes_are_planned_from_measured_rates(amago: Amago) -> None:
    shown = amago("run", "--env", "tmaze", "--minutes", 0.5, "--dry-run", "--output", "json").json
    assert shown["measured"]["update_seconds"] > 0
    assert shown["measured"]["collect_seconds"] > 0
    assert shown["expected_seconds"] > 0
    assert shown["settings"]["size"] == "tiny"


@pytest.mark.system
@pytest.mark.parametrize(
    "name", some(["gym:CartPole-v1", "gym:Pendulum-v1", "meta-frozen-lake", "gym:MountainCar-v0"], 3)
)
def test_any_environment_is_learned_from_and_none_ends_without_trajectories(amago: Amago, name: str) -> None:
    done = amago("run", "--env", name, "--steps", 250, "--run", "a", "--set", "evaluate.episodes=2", "--output", "json")
    assert done.code == 0, done.err
    assert done.json["metrics"]["updates"] > 0
    assert done.json["metrics"]["return_mean"] is not None


@pytest.mark.system
def test_a_class_of_ones_own_with_dict_observations(own: Amago) -> None:
    done = own("run", "--env", "sorter:Sorter", *SMALL, "--set", "env.length=4", "--output", "json")
    assert done.code == 0, done.err
    assert done.json["run"] == "runs/sorter-Sorter"
    assert stored("runs/sorter-Sorter")["recipe"]["plan"]["measured"]["length_max"] == 4


@pytest.mark.system
def test_a_score_that_is_not_above_random_play_is_the_last_line(own: Amago) -> None:
    done = own("run", "--env", "sorter:Still", *SMALL, "--run", "a")
    assert done.code == 0, done.err
    last = done.out.splitlines()[-1]
    assert last.startswith("the score is no better than random play: return 0, random 0")
    assert "amago watch a" in last
    assert "next:" not in done.err
    again = own("run", "--env", "sorter:Still", *SMALL, "--run", "a", "--output", "json")
    assert again.json["metrics"]["against_random"] == "equal"
    (row,) = own("runs", "a", "--output", "json").json["metrics"]["runs"]
    assert row["random_return"] == 0
    assert "random" in own("runs", "a").out


@pytest.mark.system
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--env", "tmaz"], 2, "did you mean 'tmaze'"),
        (["--env", "tmaze", "--minutes", 0], 2, "--minutes 0 is not a budget"),
        (["--env", "tmaze", "--minutes", -1], 2, "--minutes -1 is not a budget"),
        (["--env", "tmaze", "--minutes", "nan"], 2, "--minutes nan is not a budget"),
        (["--env", "tmaze", "--minutes", "inf"], 2, "--minutes inf is not a budget"),
        (["--env", "tmaze", "--steps", 0], 2, "--steps 0 is not a budget"),
        (["--env", "tmaze", "--minutes", 1, "--steps", 5], 2, "--minutes and --steps exclude each other"),
        ([], 2, "neither a recipe nor an environment is named"),
        (["quickstart", "--minutes", 5], 2, "--minutes: recipe 'quickstart' has its own length"),
        (["quickstart", "--steps", 5], 2, "--steps: recipe 'quickstart'"),
        (["quickstart", "--set", "minutes=5"], 2, "--minutes: recipe 'quickstart' has its own length"),
        (["--env", "tmaze", "--minutes", 5, "--steps", 5], 2, "exclude each other"),
        (["--env", "tmaze", "--minutes", -5], 2, "--minutes -5 is not a budget"),
        (["--env", "tmaze", "--set", "minutes=long"], 2, "minutes"),
        (["--env", "tmaze", "--set", "minutes=5", "--steps", 5], 2, "exclude each other"),
        (["--env", "tmaze", "--from", "own.hdf5"], 3, "own.hdf5"),
        (["--from", "tests.stages.test_run_offline:trajectories", "--env", "bandit"], 3, "does not fit the env"),
        (["--from", "tests.stages.test_run_offline:trajectories", "--steps", 9], 2, "--steps: no environment is named"),
        (
            ["--from", "tests.stages.test_run_offline:trajectories", "--collectors", 2],
            2,
            "collect.collectors: a run that",
        ),
        (["--from", "tests.stages.test_run_offline:trajectories", "--minutes", 0], 2, "--minutes 0 is not a budget"),
        (["quickstart", "--from", "own.hdf5"], 2, "--from: recipe 'quickstart' imports no dataset"),
        (["--env", "tmaze", "--set", 'relabel.relabeler=["scale:2"]'], 2, "has no use for relabel"),
        (["--env", "tmaze", "--set", "train.context_lenth=3"], 2, "did you mean 'train.context_length'"),
        (["--env", "tmaze", "--set", "env.corridr=3"], 2, "did you mean 'env.corridor'"),
        (["--env", "sorter:Nothing"], 3, "Nothing"),
        (["--env", "nowhere:Sorter"], 3, "no module 'nowhere'"),
        (["--env", "sorter:Broken"], 1, "no power"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(own: Amago, arguments: list[str], code: int, words: str) -> None:
    failed = own("run", *arguments)
    assert failed.code == code, failed.err
    assert words in failed.err
    assert "Traceback" not in failed.err
    assert not Path("runs").exists()


@pytest.mark.system
def test_steps_are_played_after_a_dataset_is_learned(amago: Amago) -> None:
    source = "tests.stages.test_run_offline:trajectories"
    words = ("--from", source, "--env", "tmaze", "--set", "env.corridor=4", "--set", "collect.workers=0")
    words += ("--minutes", 0.05, "--steps", 120, "--set", "epochs=4")
    shown = amago("run", *words, "--dry-run")
    assert shown.code == 0, shown.err
    assert "choices for --minutes 0.05 --steps 120" in shown.out
    assert "dataset: return" in shown.err
    done = amago("run", *words, "--output", "json")
    assert done.code == 0, done.err
    assert (done.json["metrics"]["steps"], done.json["metrics"]["ingested"]) == (120, 60)
    assert amago("run", *words, "--output", "json").json["status"] == "skipped"
    (kept,) = [row for row in stored("runs/trajectories")["recipe"]["plan"]["choices"] if row["setting"] == "stages"]
    assert [entry["stage"] for entry in kept["value"]][:4] == ["ingest", "train", "collect", "train"]
    other = amago("run", *words[:-4], "--steps", 121, "--set", "epochs=4")
    assert (other.code, "--steps 120 -> --minutes 0.05 --steps 121" in other.err) == (2, True), other.err


@pytest.mark.system
def test_a_run_of_a_recipe_is_not_taken_over(amago: Amago) -> None:
    from tests.cli.commands.test_run import RECIPE

    Path("short.toml").write_text(RECIPE)
    assert amago("run", "short.toml", "--run", "a").code == 0
    refused = amago("run", "--env", "tmaze", "--run", "a")
    assert refused.code == 2
    assert "'a' was run by recipe 'short'" in refused.err


def test_a_file_without_an_environment_is_named(amago: Amago) -> None:
    Path("bare.toml").write_text("minutes = 1\n")
    assert "recipe 'bare' names no environment" in amago("run", "bare.toml").err
    Path("two.toml").write_text("[a]\nseed = 1\n[b]\nseed = 2\n")
    refused = amago("run", "two.toml")
    assert (refused.code, "a: no such key" in refused.err) == (2, True), refused.err


@pytest.mark.system
def test_a_run_that_is_repeated_by_its_own_configuration_keeps_its_plan(amago: Amago) -> None:
    words = ("run", "--env", "tmaze", *SMALL, "--run", "a", "--output", "json")
    assert amago(*words).code == 0
    assert amago("run", "a/config.toml", "--run", "a", "--output", "json").json["status"] == "skipped"
    assert stored("a")["recipe"]["plan"]["budget"] == {"steps": 300}
    assert amago(*words).json["status"] == "skipped"


@pytest.mark.parametrize(
    "damage", ['{"minutes": "long"}', "7", '{"steps": 1, "minutes": 1.0}', '{"minutes": Infinity}', '{"steps": -3}']
)
def test_a_damaged_plan_is_reported(planned: Amago, damage: str) -> None:
    record = stored("runs/tmaze")
    record["recipe"]["plan"]["budget"] = json.loads(damage)
    Path("runs/tmaze/run.json").write_text(json.dumps(record))
    failed = planned("run", "--env", "tmaze", *SMALL, "--set", "env.corridor=3")
    assert failed.code == 4, failed.err
    assert "the plan in run.json is damaged" in failed.err


@pytest.mark.system
def test_a_killed_run_goes_on_by_its_plan_and_ends_as_one_that_was_not_killed(amago: Amago) -> None:
    """The plan is fixed: a run that repeats its config.toml is the run."""
    command = [sys.executable, "-m", "amago_cli", "run", "--env", "tmaze", "--run", "a", "--steps", "1000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "evaluate: update" in line:
                break
        process.send_signal(signal.SIGKILL)
    plan = stored("a")["recipe"]["plan"]
    done = amago(*command[3:], "--output", "json")
    assert (done.code, done.json["status"]) == (0, "done")
    assert stored("a")["recipe"]["plan"] == plan
    repeated = amago("run", "a/config.toml", "--run", "b", "--output", "json")
    assert repeated.code == 0, repeated.err
    assert repeated.json["metrics"]["updates"] == done.json["metrics"]["updates"]


@pytest.mark.system
def test_continuous_actions_of_few_dimensions_are_chosen_from_a_grid_and_sampled(amago: Amago) -> None:
    """The lake and the exported policy have the environment's actions, all of them points of the grid."""
    done = amago("run", "--env", "point-robot", *SMALL, "--output", "json")
    assert done.code == 0, done.err
    text = "select distinct action[1] as x, action[2] as y from steps where action is not null"
    rows = amago("lake", "sql", "runs/point-robot", text, "--output", "json").json
    assert {(row["x"], row["y"]) for row in rows} == set(itertools.product((-1.0, 0.0, 1.0), repeat=2))
    assert amago("export", "runs/point-robot", "--to", "policy").code == 0
    policy = load_policy("policy")
    assert json.loads(Path("policy/policy.json").read_text())["greedy"] is False
    acted = [policy.act(np.zeros(4, np.float32), 0.0) for _ in range(30)]
    assert len({tuple(action) for action in acted}) > 1
    assert {value for action in acted for value in action.tolist()} <= {-1.0, 0.0, 1.0}
