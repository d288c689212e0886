"""Environments by name, and what every built-in owes to the rest of the system."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.envs import make as registry
from pipelines.envs.make import Suite, catalogue, make, settings_model
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.spaces import Discrete

BUILT_IN = [entry.name for entry in catalogue() if not entry.is_pattern]


def test_the_catalogue_names_the_built_ins_and_patterns():
    names = [entry.name for entry in catalogue()]
    assert {"meta-frozen-lake", "dark-key-door", "tmaze", "goal-frozen-lake", "gym:ID"} <= set(names)
    assert all(entry.installed and entry.about for entry in catalogue())


@pytest.mark.parametrize("name", ["meta-frozen-lak", "nonsense", "gym:", ""])
def test_an_unknown_name_is_a_usage_error_with_a_hint(name):
    with pytest.raises(UsageError, match="unknown environment") as caught:
        make(name, num_envs=1, seed=0)
    assert caught.value.hint


def test_the_nearest_name_is_offered():
    with pytest.raises(UsageError, match="did you mean 'meta-frozen-lake'"):
        settings_model("meta-frozenlake")


def test_a_missing_extra_says_how_to_install_it(monkeypatch):
    suite = Suite(
        name="far",
        pattern="far-*",
        module="nowhere",
        about="",
        extra="far",
        requires=("a_package_that_is_not_there",),
    )
    monkeypatch.setattr(registry, "SUITES", (suite, *registry.SUITES))
    with pytest.raises(InputMissing, match=r'pip install "amago\[far\]"'):
        make("far-away", num_envs=1, seed=0)
    assert not catalogue()[0].installed


def test_settings_models_accept_their_own_dump():
    for name in BUILT_IN:
        model = settings_model(name)
        assert model.model_validate(model().model_dump()) == model()


@pytest.mark.parametrize("name", BUILT_IN)
class TestEveryBuiltIn:
    def test_observations_are_what_the_spec_says(self, name):
        env = make(name, num_envs=7, seed=0)
        observation = env.reset()
        action = env.spec.spaces.action
        assert isinstance(action, Discrete)
        rng = np.random.default_rng(0)
        for _ in range(40):
            for column, space in env.spec.spaces.observation.items():
                assert observation[column].shape == (7, *space.shape)
                assert observation[column].dtype == space.dtype
            result = env.step(rng.integers(action.n, size=7))
            assert result.reward.dtype == np.float32
            assert all(
                getattr(result, flag).dtype == bool and getattr(result, flag).shape == (7,)
                for flag in ("terminated", "truncated", "reset", "attempt_end", "success")
            )
            assert not (result.success & ~result.attempt_end).any()
            over = result.terminated | result.truncated
            observation = env.reset(over) if over.any() else result.observation

    def test_what_was_shown_is_never_written_again(self, name):
        env = make(name, num_envs=4, seed=0)
        shown = [env.reset()]
        copies = [{k: v.copy() for k, v in shown[0].items()}]
        rng = np.random.default_rng(0)
        for _ in range(30):
            result = env.step(rng.integers(env.spec.spaces.action.n, size=4))
            kept = {**result.observation, "reset": result.reset, "reward": result.reward}
            shown.append(kept)
            copies.append({k: v.copy() for k, v in kept.items()})
            over = result.terminated | result.truncated
            if over.any():
                env.reset(over)
        for kept, copy in zip(shown, copies, strict=True):
            for column, values in kept.items():
                np.testing.assert_array_equal(values, copy[column])

    def test_task_k_does_not_depend_on_the_number_of_actors(self, name):
        def first_tasks(num_envs):
            env = make(name, num_envs=num_envs, seed=4, split="test")
            found = []
            for _ in range(12 // num_envs):
                env.reset()
                found += env.tasks(np.arange(num_envs))
            return found

        assert first_tasks(12) == first_tasks(3) == first_tasks(1)

    def test_seeds_and_splits_give_other_tasks(self, name):
        def tasks(**kwargs):
            env = make(name, num_envs=40, **kwargs)
            env.reset()
            return env.tasks(np.arange(40))

        assert tasks(seed=0) == tasks(seed=0)
        assert tasks(seed=0) != tasks(seed=1)
        assert tasks(seed=0, split="test") != tasks(seed=0)

    def test_state_goes_on_with_tasks_not_met_before(self, name):
        env = make(name, num_envs=6, seed=4)
        env.reset()
        state = env.state_dict()
        env.reset()
        expected = env.tasks(np.arange(6))
        again = make(name, num_envs=3, seed=4)
        again.load_state_dict(state)
        again.reset()
        assert again.tasks(np.arange(3)) == expected[:3]
