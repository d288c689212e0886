"""XLand: rulesets of our own that can be solved, split for good, and attempts that follow each other in one step."""

from __future__ import annotations

import bz2
import pickle

import numpy as np
import pytest

pytest.importorskip("xminigrid")

import jax
import jax.numpy as jnp
from xminigrid.core.constants import Colors, Tiles
from xminigrid.core.goals import AgentNearGoal, TileNearLeftGoal, TileNearUpGoal
from xminigrid.core.rules import AgentHoldRule, TileNearRule
from xminigrid.envs.xland import XLandMiniGrid
from xminigrid.types import RuleSet

from pipelines.envs.make import make
from pipelines.envs.suites.xland_rulesets import DIFFICULTIES, GOALS, RULES, TILES, Rulesets, convert
from pipelines.errors import InputMissing, IntegrityError, UsageError
from tests.envs import contract

FEW = {"rulesets": 40, "attempts": 2, "size": 5}
FORWARD, CLOCKWISE, COUNTER, PICK, PUT, TOGGLE = range(6)


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_xland_keeps_the_contract(check):
    check("xland", params=FEW)


def test_encodings_are_those_of_the_package():
    a, b, c = (jnp.array(tile, dtype=jnp.uint8) for tile in ((3, 1), (4, 2), (5, 3)))
    assert AgentNearGoal(tile=a).encode().tolist() == [GOALS[1][1], 3, 1, 0, 0]
    assert TileNearUpGoal(tile_a=a, tile_b=b).encode().tolist() == [GOALS[2][1], 3, 1, 4, 2]
    assert TileNearLeftGoal(tile_a=a, tile_b=b).encode().tolist() == [GOALS[2][4], 3, 1, 4, 2]
    assert AgentHoldRule(tile=a, prod_tile=b).encode().tolist() == [RULES[1][0], 3, 1, 4, 2, 0, 0]
    assert TileNearRule(tile_a=a, tile_b=b, prod_tile=c).encode().tolist() == [RULES[2][0], 3, 1, 4, 2, 5, 3]
    shapes = {Tiles.BALL, Tiles.SQUARE, Tiles.PYRAMID, Tiles.KEY, Tiles.HEX, Tiles.STAR}
    assert {shape for shape, _ in TILES} == shapes
    assert Colors.EMPTY not in {color for _, color in TILES}
    assert len(GOALS[1]) + len(GOALS[2]) == len(RULES[1]) + len(RULES[2]) == 11


def rows(rulesets: Rulesets, i: int):
    """Goal, rules and tiles of one ruleset, without padding."""
    rules = [rule.tolist() for rule in rulesets.rules[i] if rule[0]]
    return rulesets.goals[i].tolist(), rules, [tuple(tile) for tile in rulesets.tiles[i].tolist() if tile[0]]


def wanted(code, kinds):
    """The tiles that a goal or rule takes, and, of a rule, what it makes."""
    count = 1 if code[0] in kinds[1] else 2
    tiles = [tuple(code[1 + 2 * k : 3 + 2 * k]) for k in range(3)]
    return tiles[:count], tiles[count]


def needed(tiles, maker, lying, depth=0):
    """All tiles on the way to `tiles`, each with its depth; KeyError where one neither lies about nor is made."""
    found = dict.fromkeys(tiles, depth)
    for tile in tiles:
        if tile not in lying:
            below = needed(maker[tile], maker, lying, depth + 1)
            assert not found.keys() & below.keys()  # no tile is needed twice
            found |= below
    return found


@pytest.mark.parametrize("kind", DIFFICULTIES)
def test_every_goal_can_be_made_from_what_lies_about_and_spoilers_can_be_avoided(kind):
    made, difficulty = Rulesets.generate(kind, 300, seed=1), DIFFICULTIES[kind]
    depths = set()
    for i in range(len(made)):
        goal, rules, lying = rows(made, i)
        maker = {}
        for rule in rules:
            inputs, product = wanted(rule, RULES)
            assert product not in lying
            assert maker.setdefault(product, inputs) is inputs  # nothing is made in two ways
        used = needed(wanted(goal, GOALS)[0], maker, lying)
        depths.add(max(used.values()))
        spoilers = {product: inputs for product, inputs in maker.items() if product not in used}
        for inputs in spoilers.values():  # one that is triggered by mere nearness, or by holding, spoils nothing needed
            assert any(tile not in used for tile in inputs)
        assert len(set(lying)) == len(lying)
        junk = [tile for tile in lying if tile not in used]
        assert len(junk) == difficulty.distractors
        assert len(spoilers) <= difficulty.spoilers
    assert max(depths) == difficulty.depth


def test_rulesets_are_different_follow_from_their_seed_and_use_all_kinds():
    made, again, other = (
        Rulesets.generate("medium", 500, 3),
        Rulesets.generate("medium", 500, 3),
        Rulesets.generate("medium", 500, 4),
    )
    np.testing.assert_array_equal(made.rules, again.rules)
    assert (made.rules != other.rules).any()
    codes = {(made.goals[i].tobytes(), made.rules[i].tobytes(), made.tiles[i].tobytes()) for i in range(500)}
    assert len(codes) == 500
    assert set(made.goals[:, 0].tolist()) == {*GOALS[1], *GOALS[2]}
    assert set(made.rules[..., 0].ravel().tolist()) == {0, *RULES[1], *RULES[2]}
    share = np.isin(made.goals[:, 0], GOALS[2]).mean()
    assert abs(share - 5 / 11) < 0.1  # each of the eleven kinds of goal is as likely


def test_rulesets_are_kept_in_a_file_without_code(tmp_path):
    made = Rulesets.generate("small", 20, 0)
    made.save(tmp_path / "mine.npz")
    read = Rulesets.load(tmp_path / "mine.npz")
    for name in ("goals", "rules", "tiles"):
        np.testing.assert_array_equal(getattr(read, name), getattr(made, name))
    with pytest.raises(InputMissing, match="does not exist"):
        Rulesets.load(tmp_path / "other.npz")
    np.savez(tmp_path / "pickled.npz", goals=np.array([object()]), rules=0, tiles=0)
    (tmp_path / "text.npz").write_text("goals")
    np.savez(tmp_path / "shape.npz", goals=made.goals[:, :4], rules=made.rules, tiles=made.tiles)
    for name in ("pickled", "text", "shape"):
        with pytest.raises(IntegrityError, match="is not a rulesets file"):
            Rulesets.load(tmp_path / f"{name}.npz")


def test_a_file_is_written_once_and_played_from_then_on(tmp_path):
    params = {**FEW, "difficulty": "small", "rulesets_file": str(tmp_path / "my-rules.npz")}
    first = make("xland", num_envs=2, seed=0, params=params)
    again = make("xland", num_envs=2, seed=0, params={**params, "rulesets": 9, "ruleset_seed": 8})
    np.testing.assert_array_equal(first.rulesets.rules, again.rulesets.rules)
    first.reset()
    assert all(name.startswith("my-rules/") for name in first.tasks(np.arange(2)))


def test_rulesets_of_training_and_test_are_disjoint():
    made = Rulesets.generate("trivial", 100, 0)
    train, test = made.split(0.2, 0)
    assert (len(train), len(test)) == (80, 20)
    assert set(train.tolist()) | set(test.tolist()) == set(range(100))
    names = {
        split: set(contract.first_tasks("xland", 50, count=200, seed=0, split=split, params=FEW))
        for split in ("train", "test")
    }
    assert not names["train"] & names["test"]
    assert (len(names["train"]), len(names["test"])) == (32, 8)


def test_the_published_protocol_plays_all_rulesets_on_both_sides():
    params = {**FEW, "protocol": "paper"}
    names = {
        split: contract.first_tasks("xland", 50, count=400, seed=0, split=split, params=params)
        for split in ("train", "test")
    }
    assert set(names["train"]) == set(names["test"])
    assert names["train"] != names["test"]


@pytest.mark.full
@pytest.mark.parametrize("params", [{"difficulty": "trivial"}, {"difficulty": "medium", "rooms": 4, "size": 7}])
def test_a_ruleset_is_played_as_the_package_plays_it(params):
    env = make("xland", num_envs=2, seed=0, params={**FEW, "attempts": 3, **params})
    size, limit = env.settings.size, env.settings.attempt_steps
    package = XLandMiniGrid()
    made = package.default_params(height=size, width=size, max_steps=limit, grid_type=f"R{env.settings.rooms}")
    reset, step, rng = jax.jit(package.reset), jax.jit(package.step), np.random.default_rng(0)
    worlds, timesteps, attempts = [None, None], [None, None], [0, 0]

    def begin(i):
        r, number = env.rulesets, env.ruleset[i]
        worlds[i] = made.replace(
            ruleset=RuleSet(*map(jnp.asarray, (r.goals[number], r.rules[number], r.tiles[number])))
        )
        timesteps[i] = reset(worlds[i], jax.random.fold_in(env._keys[i], attempts[i]))

    def compare(shown, i):
        np.testing.assert_array_equal(shown["obs.cells"][i], np.ravel(timesteps[i].observation))
        np.testing.assert_array_equal(shown["obs.goal"][i], env.rulesets.goals[env.ruleset[i]])
        assert shown["obs.direction"][i] == timesteps[i].state.agent.direction

    shown, ends = env.reset(), 0
    for i in range(2):
        begin(i)
        compare(shown, i)
    for _ in range(max(200, limit + 20)):
        action = rng.integers(6, size=2)
        result = env.step(action)
        for i in range(2):
            timesteps[i] = step(worlds[i], timesteps[i], action[i])
            assert result.reward[i] == timesteps[i].reward
            assert result.attempt_end[i] == bool(timesteps[i].last())
            assert result.success[i] == bool(timesteps[i].last() and timesteps[i].reward > 0)
            if result.reset[i]:
                ends, attempts[i] = ends + 1, attempts[i] + 1
                begin(i)
            compare(result.observation, i)
        if result.terminated.any():
            shown = env.reset(result.terminated)
            for i in np.flatnonzero(result.terminated):
                ends, attempts[i] = ends + 1, 0
                begin(i)
                compare(shown, i)
    assert ends >= 2


@pytest.mark.full
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_cells_alone_keep_the_contract(check):
    check("xland", params={**FEW, "cells_only": True})


def test_cells_alone_have_the_spaces_of_imported_histories(tmp_path):
    pytest.importorskip("h5py")
    from pipelines.config.settings import SourceSettings
    from pipelines.formats.make import open_importer
    from tests.formats.test_learning_histories import xland

    source = open_importer(SourceSettings(name=f"xland:{xland(tmp_path / 'xland.hdf5')}"))
    assert make("xland", num_envs=1, seed=0, params={**FEW, "cells_only": True}).spec.spaces == source.spaces
    assert make("xland", num_envs=1, seed=0, params=FEW).spec.spaces != source.spaces


def test_cells_alone_are_those_of_the_package():
    """As the datasets pack them, tile * 12 + colour, and the importer unpacks them."""
    env = make("xland", num_envs=2, seed=0, params={**FEW, "attempts": 1, "cells_only": True})
    package, rng, shown = XLandMiniGrid(), np.random.default_rng(0), env.reset()
    made = package.default_params(height=5, width=5, max_steps=75, grid_type="R1")
    reset, step, r = jax.jit(package.reset), jax.jit(package.step), env.rulesets
    worlds = [
        made.replace(ruleset=RuleSet(*map(jnp.asarray, (r.goals[n], r.rules[n], r.tiles[n])))) for n in env.ruleset
    ]
    theirs = [reset(world, jax.random.fold_in(key, 0)) for world, key in zip(worlds, env._keys, strict=True)]
    different = set()
    for _ in range(60):
        assert list(shown) == ["obs.cells"]
        for i, timestep in enumerate(theirs):
            packed = np.asarray(timestep.observation)[..., 0] * 12 + np.asarray(timestep.observation)[..., 1]
            unpacked = np.stack(np.divmod(packed, 12), axis=-1).reshape(-1)
            np.testing.assert_array_equal(shown["obs.cells"][i], unpacked)
            different.add(unpacked.tobytes())
        action = rng.integers(6, size=2)
        result = env.step(action)
        theirs = [step(world, t, a) for world, t, a in zip(worlds, theirs, action, strict=True)]
        if result.terminated.any():
            break
        shown = result.observation
    assert len(different) > 10


def test_attempts_follow_in_the_same_step_and_the_last_one_terminates():
    env = make("xland", num_envs=3, seed=0, params=FEW)
    assert (env.spec.horizon, env.spec.num_attempts) == (2 * 75, 2)
    shown = env.reset()
    assert shown["obs.begins"].tolist() == [[1]] * 3
    env.play_only(["trivial/3", "trivial/3", "trivial/5"])
    goals = env.reset()["obs.goal"]
    np.testing.assert_array_equal(goals, env.rulesets.goals[[3, 3, 5]])
    ended = np.zeros(3, dtype=int)
    for step in range(1, 151):
        result = env.step(
            np.full(3, CLOCKWISE)
        )  # turning reaches no goal but by luck of the start, which does not count
        ended += result.attempt_end
        assert not result.truncated.any()
        assert result.attempt_end.tolist() == [step % 75 == 0] * 3
        assert result.reset.tolist() == [step == 75] * 3
        assert result.terminated.tolist() == [step == 150] * 3
        np.testing.assert_array_equal(result.observation["obs.begins"][:, 0], result.reset)
    assert ended.tolist() == [2] * 3
    assert not result.success.any()


def test_goals_pay_less_the_later_they_are_reached():
    env = make("xland", num_envs=64, seed=0, params={**FEW, "attempts": 4})
    env.reset()
    rng, clock, won = np.random.default_rng(0), np.zeros(64), 0
    for _ in range(150):
        result = env.step(rng.integers(6, size=64))
        clock += 1
        paid = result.reward > 0
        np.testing.assert_array_equal(paid, result.success)
        np.testing.assert_allclose(result.reward[paid], 1 - 0.9 * clock[paid] / 75, rtol=1e-5)
        clock[result.attempt_end] = 0
        won += paid.sum()
        if result.terminated.any():
            env.reset(result.terminated)
    assert won > 10


def test_what_others_see_stays_when_some_are_reset():
    env = make("xland", num_envs=4, seed=0, params={**FEW, "attempts": 3})
    env.reset()
    rng = np.random.default_rng(0)
    for _ in range(80):
        before = env.step(rng.integers(6, size=4)).observation
        after = env.reset(np.array([True, False, False, False]))
        for name, column in before.items():
            np.testing.assert_array_equal(after[name][1:], column[1:])


def test_a_step_and_a_reset_are_compiled_once():
    env = make("xland", num_envs=6, seed=0, params={**FEW, "difficulty": "small"})
    env.reset()
    for mask in ([1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]):
        env.step(np.zeros(6, dtype=np.int32))
        env.reset(np.array(mask, dtype=bool))
    env.step(np.zeros(6, dtype=np.int32))
    assert (env._step_all._cache_size(), env._reset_all._cache_size()) == (1, 1)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="18 things do not fit into 1 rooms of 5x5 cells"):
        make("xland", num_envs=1, seed=0, params={**FEW, "difficulty": "high"})
    with pytest.raises(UsageError, match="nine rooms need a size"):
        make("xland", num_envs=1, seed=0, params={"rooms": 9})
    env = make("xland", num_envs=1, seed=0, params=FEW)
    for wrong in ("trivial/40", "small/1", "3"):
        with pytest.raises(InputMissing, match="is not a task of"):
            env.play_only([wrong])


def test_published_rulesets_are_played_once_converted(tmp_path):
    made = Rulesets.generate("small", 30, seed=5)
    content = {"goals": made.goals, "rules": made.rules, "init_tiles": made.tiles, "num_rules": np.zeros(30, np.uint8)}
    with bz2.open(tmp_path / "small_1m_v3", "wb") as file:
        pickle.dump({name: jnp.asarray(value) for name, value in content.items()}, file)
    assert convert(tmp_path / "small_1m_v3", tmp_path / "small.npz") == 30
    env = make("xland", num_envs=2, seed=0, params={"rulesets_file": str(tmp_path / "small.npz"), "attempts": 1})
    np.testing.assert_array_equal(env.rulesets.rules, made.rules)
    env.reset()
    assert all(task.startswith("small/") for task in env.tasks(np.arange(2)))
    env.step(np.zeros(2, dtype=np.int32))
