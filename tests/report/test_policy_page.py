"""The page in which an exported policy plays frozen lakes: its rules are those of the environment."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.envs.make import make
from pipelines.envs.suites.frozen_lake import FrozenLake
from pipelines.envs.suites.lake_maps import list_split_maps
from pipelines.errors import InputMissing, IntegrityError, UsageError
from pipelines.report import onnxruntime_web, policy_page

ASSETS = Path(policy_page.__file__).parent / "assets"
GRU = {"sequence": {"kind": "gru"}}
QUICKSTART = {"name": "meta-frozen-lake", "size": 4, "attempts": 5, "max_episode_steps": 10}


def in_node(script: str, given: Any) -> Any:
    """Run a module of JavaScript that has the exports of lake.mjs and `given`; return what it printed."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node here")
    lake = (ASSETS / "lake.mjs").as_uri()
    code = f'import * as lake from "{lake}"; import {{ readFileSync }} from "node:fs"; const given = '
    code += f'JSON.parse(readFileSync(0, "utf-8")); {script}'
    command = [node, "--input-type=module", "-e", code]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


PLAY = """
console.log(JSON.stringify(given.tasks.map((task, n) => {
  const holes = [...task.replaceAll("/", "")].map((mark) => mark === "#");
  const own = new lake.Lake(given.rules, holes);
  const rows = [own.observation()];
  for (const action of given.actions[n]) {
    const { reward, ended, success } = own.step(action);
    rows.push([...own.observation(), reward, ended ? 1 : 0, success ? 1 : 0, own.over ? 1 : 0]);
    if (own.over) break;
  }
  return rows;
})));
"""


@pytest.mark.parametrize(
    "params",
    [
        {"size": 4, "attempts": 5, "max_episode_steps": 10},
        {"size": 3, "attempts": 2},
        {"size": 2, "attempts": 3, "show_progress": False},
    ],
)
def test_lakes_behave_step_by_step_as_the_environment(params: dict[str, Any]) -> None:
    actors = 40
    env = make("meta-frozen-lake", num_envs=actors, seed=3, params=params)
    assert isinstance(env, FrozenLake)
    own, rng = env.settings, np.random.default_rng(0)
    observation = env.reset()["obs"]
    tasks = env.tasks(np.arange(actors))
    rows: list[list[list[float]]] = [[each.tolist()] for each in observation]
    actions = rng.choice(5, p=[0.1, 0.35, 0.1, 0.35, 0.1], size=(own.attempts * own.attempt_steps, actors))
    done = np.zeros(actors, bool)
    for taken in actions:
        found = env.step(taken)
        for actor in np.flatnonzero(~done):
            more = (found.reward, found.attempt_end, found.success, found.terminated)
            rows[actor].append([*found.observation["obs"][actor].tolist(), *(float(each[actor]) for each in more)])
        done |= found.terminated
        if done.any():
            env.reset(found.terminated)  # its actors play on, and are not compared any more
    assert done.all()
    rules = {"size": own.size, "attempts": own.attempts, "limit": own.attempt_steps, "progress": own.show_progress}
    played = in_node(PLAY, {"tasks": tasks, "rules": rules, "actions": actions.T.tolist()})
    assert {bool(row[6]) for each in rows for row in each[1:]} == {False, True}  # successes, and other steps
    for expected, mine in zip(rows, played, strict=True):
        assert len(mine) == len(expected)
        for theirs, ours in zip(expected, mine, strict=True):
            np.testing.assert_array_equal(np.float32(ours), np.float32(theirs))


def test_lakes_are_drawn_with_the_probabilities_of_the_environment() -> None:
    holes, weight = list_split_maps(3, 0.0, "test")
    inner = holes[:, 1:-1]
    codes = (inner @ (1 << np.arange(inner.shape[1]))).tolist()
    drawn = in_node(
        """
        let place = 0;
        const source = new lake.LakeSource(3, given.codes, () => (place + 0.5) / given.draws);
        const found = [];
        for (; place < given.draws; place++) found.push(source.draw().map(Number).join(""));
        console.log(JSON.stringify(found));
        """,
        {"codes": codes, "draws": 20_000},
    )
    counts = {"".join(str(int(hole)) for hole in row): 0 for row in holes}
    for each in drawn:
        counts[each] += 1
    np.testing.assert_allclose(np.array(list(counts.values())) / len(drawn), weight, atol=2e-4)


def test_shortest_ways_are_found() -> None:
    tasks = {"..../..../..../....": 6, ".#../..#./.##./....": 6, ".#../#.../..../....": None}
    script = """
    const holes = (task) => [...task.replaceAll("/", "")].map((mark) => mark === "#");
    console.log(JSON.stringify(given.map((task) => lake.shortest(4, holes(task)))));
    """
    assert in_node(script, list(tasks)) == list(tasks.values())


@pytest.mark.parametrize(
    "env",
    [
        {"name": "tmaze"},
        QUICKSTART | {"hard": True},
        QUICKSTART | {"recover": True},
        QUICKSTART | {"slip": 0.1},
        QUICKSTART | {"size": 5},
        {},
    ],
)
def test_policies_of_other_environments_are_refused(env: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="a page shows meta-frozen-lake"):
        policy_page.make_environment({"env": env, "agent": GRU})
    assert policy_page.make_environment({"env": QUICKSTART, "agent": GRU}).settings.attempt_steps == 10


@pytest.mark.parametrize("kind", ["feedforward", "identity"])
def test_policies_without_memory_are_refused(kind: str) -> None:
    with pytest.raises(UsageError, match=f"one with the encoder '{kind}' has none"):
        policy_page.make_environment({"env": QUICKSTART, "agent": {"sequence": {"kind": kind}}})


def test_the_runtime_must_be_the_known_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputMissing, match="no onnxruntime-web in"):
        onnxruntime_web.read_files(str(tmp_path), print)
    dist = tmp_path / "node_modules" / "onnxruntime-web" / "dist"
    dist.mkdir(parents=True)
    for name in onnxruntime_web.SHA256:
        (dist / name).write_text("alert(1)")
    with pytest.raises(IntegrityError, match="is not that of onnxruntime-web"):
        onnxruntime_web.read_files(str(tmp_path), print)
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputMissing, match="there is no npm here"):
        onnxruntime_web.read_files("", lambda _: None)
