"""Retro: an emulator process each, pictures that tell the console, and ROM files known by what is in them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("stable_retro")

import stable_retro

from pipelines.envs.make import make
from pipelines.envs.suites.retro_emulator import CONSOLES, choose_color, draw
from pipelines.errors import InputMissing, StageFailed, UsageError
from tests.envs import contract

GAME = "retro:Airstriker-Genesis-v0"
B = 0


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_retro_keeps_the_contract(check):
    sizes = {"count": 4} if "count" in check.__kwdefaults__ else {"num_envs": 2}
    if "steps" in check.__kwdefaults__:
        sizes["steps"] = 12
    check(GAME, params={"max_frames": 64}, **sizes)


def test_steps_are_frames_and_twenty_minutes_truncate():
    env = make(GAME, num_envs=1, seed=0)
    assert (env.spec.horizon, env.spec.spaces.action.n) == (20 * 60 * 60 // 8, 12)
    env.close()
    env = make(GAME, num_envs=1, seed=0, params={"max_frames": 20})
    assert env.spec.horizon == 3
    env.reset()
    ends = [bool(env.step(np.zeros((1, 12))).truncated[0]) for _ in range(3)]
    assert ends == [False, False, True]
    env.close()


def test_rewards_and_ends_are_those_of_the_package():
    """The same buttons, eight frames each, in stable-retro's own environment."""
    env = make(GAME, num_envs=1, seed=0, params={"idle_frames": 1})
    env.reset()
    rng = np.random.default_rng(0)
    actions = rng.integers(2, size=(60, 12), dtype=np.int8)
    actions[:, 3] = 0  # START would pause
    actions[:, B] = rng.integers(2, size=60)  # fire
    mine = [env.step(buttons[None]) for buttons in actions]
    env.close()  # one emulator a process holds for this one too
    theirs = stable_retro.make("Airstriker-Genesis-v0", render_mode="rgb_array")
    theirs.reset()
    total = 0.0
    for buttons, result in zip(actions, mine, strict=True):
        frames = [theirs.step(buttons) for _ in range(8)]
        assert result.reward[0] == sum(frame[1] for frame in frames)
        np.testing.assert_array_equal(result.observation["obs"][0], draw(frames[-1][0], 84, choose_color("Genesis")))
        total += result.reward[0]
    assert total > 0
    theirs.close()


def test_a_picture_is_a_mean_over_areas_inside_its_consoles_colour():
    rng = np.random.default_rng(0)
    screen = rng.integers(256, size=(160, 240, 3), dtype=np.uint8)
    shown = draw(screen, 84, (1, 2, 3))
    means = screen.reshape(80, 2, 80, 3, 3).astype(np.float64).mean(axis=(1, 3))
    assert np.abs(shown[2:-2, 2:-2] - means).max() <= 0.51
    for edge in (shown[:2], shown[-2:], shown[:, :2], shown[:, -2:]):
        assert (edge == (1, 2, 3)).all()
    assert draw(screen[:, :, :1].repeat(3, axis=2) * 0 + 7, 33, (0, 0, 0))[2:-2, 2:-2].tolist() == [[[7] * 3] * 29] * 29
    assert len({choose_color(console) for console in CONSOLES}) == len(CONSOLES)
    assert set(CONSOLES) >= set(stable_retro.data.EMU_INFO)


def test_tests_begin_otherwise_than_training():
    """An even number of idle frames in training, an odd one in tests."""
    begun = {}
    for split in ("train", "test"):
        env = make(GAME, num_envs=6, seed=0, split=split)
        begun[split] = {shown.tobytes() for shown in env.reset()["obs"]}
        env.close()
    assert len(begun["train"]) > 1
    assert not begun["train"] & begun["test"]


def test_a_rom_is_found_by_what_is_in_it(tmp_path):
    rom = stable_retro.data.get_romfile_path("Airstriker-Genesis-v0")
    (tmp_path / "cartridges").mkdir()
    shutil.copy(rom, tmp_path / "cartridges" / "Some Shooter (World).MD")
    (tmp_path / "cartridges" / "other.md").write_bytes(b"not this one")
    pictures = []
    for params in ({}, {"rom_dir": str(tmp_path)}):
        env = make(GAME, num_envs=1, seed=0, params=params)
        env.reset()
        pictures.append(env.step(np.ones((1, 12))).observation["obs"])
        env.close()
    np.testing.assert_array_equal(*pictures)
    Path(tmp_path / "cartridges" / "Some Shooter (World).MD").unlink()
    with pytest.raises(InputMissing, match=r"none of the 1 ROM files .* is Airstriker.*; its SHA-1 is a8be7b0c"):
        make(GAME, num_envs=1, seed=0, params={"rom_dir": str(tmp_path)})


def test_an_emulator_that_is_killed_is_told():
    env = make(GAME, num_envs=2, seed=0)
    env.reset()
    env._processes[1]._process.kill()
    env._processes[1]._process.wait()
    with pytest.raises(StageFailed, match=r"'retro:Airstriker-Genesis-v0': its emulator ended with exit code -9"):
        env.step(np.zeros((2, 12)))
    env.close()


def test_what_is_wrong_is_refused():
    with pytest.raises(InputMissing, match=r"there is no ROM of 1942-Nes-v0; set env\.rom_dir"):
        make("retro:1942-Nes", num_envs=1, seed=0)
    with pytest.raises(UsageError, match="did you mean 'retro:Airstriker-Genesis-v0'"):
        make("retro:Airstrike-Genesis", num_envs=1, seed=0)
    with pytest.raises(UsageError, match="no saved state 'Level9'; states: Level1"):
        make(GAME, num_envs=1, seed=0, params={"states": ["Level9"]})
    with pytest.raises(UsageError, match="both of training and of test: Level1"):
        make(GAME, num_envs=1, seed=0, params={"states": ["Level1"], "test_states": ["Level1"]})
    env = make(GAME, num_envs=1, seed=0)
    env.play_only(["Level1"])
    with pytest.raises(InputMissing, match="'Level2' is not a task"):
        env.play_only(["Level2"])
