"""The benchmark of generality: its table, its aggregates, its files, and seconds of it."""

import itertools
import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from benchmarks.general_parts import book, own, runs
from benchmarks.general_parts.scores import performance_profile
from benchmarks.general_parts.tasks import AGENTS, Task, episode_returns, load_tasks, random_actions, write_random
from pipelines.envs.make import requirement
from pipelines.evaluation.statistics import bootstrap_ci_of_iqm, compute_iqm
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete

ROOT = Path(__file__).parents[2]
TASKS = load_tasks()


def task(name="walk", *, random=-10.0, best=90.0, kind="report"):
    fields = {"env": "tmaze", "kind": "memory", "episodes": 10, "source": "bound", "peers": ("ppo", "dqn")}
    return Task(name=name, set=kind, random=random, best=best, **fields)


def row(name="walk", agent="ppo", seed=1, *, sampled=0.0, greedy=0.0, seconds=300.0):
    facts = {"seconds": seconds, "version": "0.1.0", "commit": "abc"}
    return {"task": name, "agent": agent, "seed": seed, "sampled": sampled, "greedy": greedy, **facts}


def test_table_covers_every_kind_and_random_play_is_worse_than_the_best():
    kinds = {each.kind for each in TASKS.values()}
    assert kinds >= {"classic control", "box2d", "mujoco", "dm_control", "grid", "memory", "gymnax", "meta", "pixels"}
    assert len(TASKS) >= 24
    assert sum(each.set == "report" for each in TASKS.values()) >= 14
    assert sum(each.set == "tuning" for each in TASKS.values()) >= 10
    for each in TASKS.values():
        assert each.random < each.best, each.name
        assert each.source, each.name
        assert each.episodes >= 8, each.name
        assert each.peers or each.set == "popgym", each.name
        assert set(each.peers) < set(AGENTS), each.name


@pytest.mark.parametrize("name", TASKS)
def test_a_command_names_the_environment_and_its_parameters(name, tmp_path):
    words = own.amago_command(TASKS[name], seconds=60, seed=1, run=tmp_path / "run")
    given = [after for word, after in itertools.pairwise(words) if word == "--set"]
    tables = tomllib.loads("\n".join(given)).get("env", {})
    assert not any(each.startswith("env=") for each in given)  # which would replace the name
    assert words[words.index("--env") + 1] == TASKS[name].env
    assert tables == dict(TASKS[name].params)


@pytest.mark.extras
@pytest.mark.parametrize("name", TASKS)
def test_task_is_made_where_its_extra_is_installed(name):
    extra, present = requirement(TASKS[name].env)
    if not present:
        pytest.skip(f"needs amago[{extra}]")
    env = TASKS[name].make(num_envs=2, seed=0, split="test")
    try:
        space = env.spec.spaces.action
        assert isinstance(space, Box) == ("sac" in TASKS[name].peers or name == "pendulum-positions")
        env.reset()
        assert np.isfinite(env.step(random_actions(space, 2, np.random.default_rng(0))).reward).all()
    finally:
        env.close()


def test_peers_have_settings_of_the_zoo_by_the_name_that_a_task_gives():
    rows = tomllib.loads((ROOT / "benchmarks/general_parts/peers.toml").read_text())
    assert rows.keys() == {*AGENTS} - {"amago"}
    assert all("default" in found and all("n_envs" in each for each in found.values()) for found in rows.values())
    named = {name for found in rows.values() for name in found} - {"default"}
    assert named == {each.zoo for each in TASKS.values()} - {"default"}


def test_measured_random_score_is_written_into_its_row_alone(tmp_path):
    path = tmp_path / "tasks.toml"
    path.write_text("[a]\nenv = 'x'\nrandom = nan\nbest = 1\n\n[ab]\nrandom = 2\nbest = 3\n")
    write_random("a", 0.123456, path)
    assert path.read_text() == "[a]\nenv = 'x'\nrandom = 0.1235\nbest = 1\n\n[ab]\nrandom = 2\nbest = 3\n"
    with pytest.raises(ValueError, match="no row b"):
        write_random("b", 1.0, path)


@pytest.mark.parametrize(
    "space",
    [Discrete(n=3), MultiDiscrete(nvec=(2, 3)), MultiBinary(n=2), Box(shape=(2,))],
    ids=lambda s: type(s).__name__,
)
def test_random_actions_cover_the_space(space):
    drawn = random_actions(space, 1000, np.random.default_rng(0))
    assert drawn.shape == (1000, *space.shape)
    assert drawn.dtype == space.dtype
    if isinstance(space, Box):
        assert -1 <= drawn.min() < -0.9
        assert 0.9 < drawn.max() <= 1
    else:
        assert (
            len(np.unique(drawn, axis=0)) == {"Discrete": 3, "MultiDiscrete": 6, "MultiBinary": 4}[type(space).__name__]
        )


class Lengths:
    """Actor i plays episodes of i + 1 steps, each of a reward of 1."""

    num_envs = 3

    def reset(self, mask=None):
        self.time = np.where(True if mask is None else mask, 0, getattr(self, "time", 0)) * np.ones(3, int)
        return {}

    def step(self, actions):
        from types import SimpleNamespace

        self.time += 1
        over = self.time >= np.arange(3) + 1
        return SimpleNamespace(reward=np.ones(3), terminated=over, truncated=np.zeros(3, bool), observation={})


def test_every_actor_plays_as_many_episodes_however_long_they_are():
    found = episode_returns(Lengths(), lambda observation, begins: None, 7)
    assert found.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_scores_are_scaled_between_random_and_best():
    assert task().normalize(-10) == 0
    assert task().normalize(40) == 0.5
    assert task(random=-200, best=-100).normalize(-125) == 0.75


def test_interquartile_mean_of_eight_runs_is_that_of_the_middle_four():
    scores = [np.array([0.0, 9.0, 0.1, 0.3]), np.array([0.2, 0.4, -5.0, 1.0])]
    assert compute_iqm(np.concatenate(scores)) == pytest.approx((0.1 + 0.2 + 0.3 + 0.4) / 4)


def test_profile_counts_runs_above_each_level():
    levels = np.array([0.0, 0.25, 0.5, 1.0])
    share, low, high = performance_profile([np.array([0.1, 0.3]), np.array([0.6, 1.0])], levels)
    assert share.tolist() == [1.0, 0.75, 0.5, 0.0]
    # Runs are drawn within each task: of the first one, both may be .1 or both .3; the second is above .5 always.
    assert (low[1], high[1]) == (0.5, 1.0)
    assert (low[2], high[2]) == (0.5, 0.5)


def test_aggregates_equal_those_of_rliable():
    library = pytest.importorskip("rliable.library")
    metrics = pytest.importorskip("rliable.metrics")
    scores = np.random.default_rng(0).gamma(1.0, size=(5, 7))  # runs x tasks
    strata, levels = [*scores.T], np.linspace(0, 3, 20)
    assert compute_iqm(scores.ravel()) == pytest.approx(metrics.aggregate_iqm(scores))
    share, low, high = performance_profile(strata, levels)
    theirs, intervals = library.create_performance_profile({"a": scores}, levels, reps=2000)
    np.testing.assert_allclose(share, theirs["a"])
    np.testing.assert_allclose([low, high], intervals["a"], atol=0.06)
    _, bounds = library.get_interval_estimates({"a": scores}, lambda x: np.array([metrics.aggregate_iqm(x)]), reps=2000)
    np.testing.assert_allclose(bootstrap_ci_of_iqm(strata), bounds["a"][:, 0], atol=0.05)


def test_results_are_appended_whole_after_a_line_that_was_cut_short(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    runs.append(path, row(seed=1))
    with path.open("a") as file:
        file.write('{"task": "wa')
    assert runs.read(path) == [row(seed=1)]
    runs.append(path, row(seed=2))
    assert runs.read(path) == [row(seed=1), row(seed=2)]


def test_runs_that_are_there_are_not_repeated(tmp_path, monkeypatch):
    played = []
    monkeypatch.setattr(runs, "run_one", lambda job: played.append(job["seed"]) or {**row(seed=job["seed"]), **FIGURES})
    jobs = [{"task": "walk", "agent": "ppo", "seed": seed, "seconds": 300.0, "episodes": 10} for seed in (1, 2)]
    for wanted in (jobs[:1], jobs, jobs):
        assert runs.run_all(wanted, tmp_path / "results.jsonl") == 0
    assert played == [1, 2]
    assert runs.run_all([{**jobs[0], "seconds": 60.0}], tmp_path / "results.jsonl") == 0
    assert played == [1, 2, 1]


FIGURES = {"env_steps": 10, "train_cpu_seconds": 1.0}


def test_failed_run_is_counted_and_not_recorded(tmp_path, monkeypatch):
    def fail(job):
        raise runs.RunFailed("exit 1: no such thing")

    monkeypatch.setattr(runs, "run_one", fail)
    job = {"task": "walk", "agent": "ppo", "seed": 1, "seconds": 300.0, "episodes": 10}
    assert runs.run_all([job], tmp_path / "results.jsonl") == 1
    assert runs.read(tmp_path / "results.jsonl") == []


def test_best_peer_is_the_one_of_the_highest_mean_in_each_task():
    tasks = {name: task(name, random=0, best=100) for name in ("a", "b")}
    rows = [row("a", "ppo", sampled=40), row("a", "dqn", greedy=60, sampled=90), row("b", "ppo", sampled=10)]
    found = book.normalized([*rows, row("b", "amago", sampled=99)], tasks)
    assert found[book.BEST_PEER] == {"a": {1: 0.6}, "b": {1: 0.1}}
    assert found["amago"] == {"b": {1: 0.99}}


def test_section_has_every_seed_and_the_rest_of_the_page_is_kept(tmp_path, monkeypatch):
    tasks = {"a": task("a", random=0, best=100), "b": task("b", random=0, best=1, kind="tuning")}
    monkeypatch.setattr(book, "load_tasks", lambda: tasks)
    page, results, plot = tmp_path / "results.md", tmp_path / "general.jsonl", tmp_path / "general.svg"
    page.write_text(f"before\n{book.SECTION.begin}\nold\n{book.SECTION.end}\nafter\n")
    for seed, score in ((1, 20.0), (2, 30.0), (3, 70.0)):
        runs.append(results, row("a", "amago", seed, sampled=score, greedy=score + 1))
    runs.append(results, row("b", "ppo", sampled=0.5, greedy=0.25))
    assert book.write(results, page, plot)["runs"] == 4
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| a | 0 | 100 | 20 / 21, 30 / 31, 70 / 71 |" in text
    assert "| amago | 0.400 | 0.200 to 0.700 | 0.400 | 0.410 | 1 | 3 |" in text
    assert "| b | 0 | 1 | 0.5 / 0.25 |" in text
    assert plot.read_text().startswith("<svg")


def test_games_are_compared_with_published_scores_by_the_highest_mean_return(tmp_path, monkeypatch):
    fields = {"kind": "memory", "set": "popgym", "episodes": 10, "peers": (), "random": -0.5}
    published = {"popgym-AEasy": (0.1, 0.3), "popgym-BEasy": (0.9, 0.9005)}
    tasks = {
        name: Task(name=name, env=name, gru=gru, best=best, source="LSTM", **fields)
        for name, (gru, best) in published.items()
    }
    monkeypatch.setattr(book, "load_tasks", lambda: tasks)
    page, results, plot = tmp_path / "results.md", tmp_path / "general.jsonl", tmp_path / "general.svg"
    page.write_text(f"{book.SECTION.begin}{book.SECTION.end}")
    for name, seed, sampled, middle in (("A", 1, 0.1, 0.25), ("A", 2, 0.34, 0.2), ("B", 1, 0.9001, 0.0)):
        curve = [{"sampled": middle, "greedy": 5.0}, {"greedy": 5.0}]
        facts = {"curve": curve, "env_steps": 2000, "train_cpu_seconds": 299.6}
        runs.append(results, {**row(f"popgym-{name}Easy", "amago", seed, sampled=sampled, greedy=0.5), **facts})
    book.write(results, page, plot)
    text = page.read_text()
    # A: (.25 + .34) / 2 is above GRU's .1 and below the best, .3. B: .900 is at least GRU's .9, and below .9005.
    assert "GRU in 2 and the best of 13 in 0 of 2 games" in text
    assert "| AEasy | -0.500 | 0.100 | 0.300 | LSTM | 0.250, 0.340 | 0.1 / 0.5, 0.34 / 0.5 | 2,000 | 300 |" in text
    assert "Performance profiles" not in text
    assert not plot.exists()
    picture = plot.with_name("popgym.svg").read_text()
    assert all(name in picture for name in ("AEasy", "BEasy", "best of 13", "random"))


@pytest.mark.system
def test_cpu_seconds_of_a_process_include_those_of_its_children():
    spin = "import time\nwhile time.process_time() < .3: pass"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert own.tree_cpu_seconds(child.pid) >= 0.3
        child.communicate(b"\n")
    assert own.tree_cpu_seconds(child.pid) == 0


@pytest.mark.full
def test_benchmark_runs_amago_for_seconds(tmp_path):
    results = tmp_path / "results.jsonl"
    words = ["benchmarks/general.py", "run", "--task", "cartpole", "--agent", "amago", "--seconds", "12"]
    command = [sys.executable, *words, "--episodes", "4", "--seed", "3", "--to", str(results)]
    for told in ("1 runs, 0 of 1", "0 runs, 1 of 1"):  # the second time nothing is left to do
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert told in done.stdout
    [found] = [json.loads(line) for line in results.read_text().splitlines()]
    assert (found["task"], found["agent"], found["seed"], found["episodes"]) == ("cartpole", "amago", 3, 4)
    assert found["sampled"] >= 1
    assert found["greedy"] >= 1
    assert found["train_cpu_seconds"] > 1
    assert found["env_steps"] > 0
    assert math.isfinite(found["curve"][-1]["sampled"])
    assert found["commit"] or found["version"]
    assert len(found["settings_digest"]) == 12


@pytest.mark.system
def test_unknown_task_is_refused():
    words = [sys.executable, "benchmarks/general.py", "run", "--task", "cartpol"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no task 'cartpol'; there are: lunarlander" in done.stderr
    assert "Traceback" not in done.stderr
