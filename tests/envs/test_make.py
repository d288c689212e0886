"""Environments by name, and what every built-in owes to the rest of the system."""

from __future__ import annotations

import pytest

from pipelines.envs import make as registry
from pipelines.envs.make import catalogue, find_settings_model, make
from pipelines.envs.suites.catalogue import Entry
from pipelines.errors import InputMissing, UsageError
from tests.envs import contract

BUILT_IN = [entry.name for entry in catalogue() if entry.suite == "built-in"]


def test_the_catalogue_names_the_built_ins_and_patterns():
    names = [entry.name for entry in catalogue()]
    assert {"meta-frozen-lake", "dark-key-door", "tmaze", "goal-frozen-lake", "gym:ID"} <= set(names)
    assert all(entry.about for entry in catalogue())
    assert all(entry.installed for entry in catalogue() if entry.extra is None)


@pytest.mark.parametrize("name", ["meta-frozen-lak", "nonsense", "gym:", ""])
def test_an_unknown_name_is_a_usage_error_with_a_hint(name):
    with pytest.raises(UsageError, match=r"unknown environment|no environment is named") as caught:
        make(name, num_envs=1, seed=0)
    assert caught.value.hint


def test_the_nearest_name_is_offered():
    with pytest.raises(UsageError, match="did you mean 'meta-frozen-lake'"):
        find_settings_model("meta-frozenlake")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("CartPole-v1", "gym:CartPole-v1"),
        ("cartpole", "gym:CartPole-v1"),
        ("metaworld-ml1", "metaworld-ml1-TASK"),
        ("atari", "atari-GAME"),
        ("zzz", None),
    ],
)
def test_an_id_of_gymnasium_is_offered_with_its_prefix(name, meant):
    with pytest.raises(UsageError) as caught:
        find_settings_model(name)
    assert caught.value.hint == (f"did you mean '{meant}'?" if meant else "amago envs lists them")


def test_a_missing_extra_says_how_to_install_it_and_beside_what_not(monkeypatch):
    entry = Entry(
        name="far-PLACE",
        suite="far",
        suite_class="nowhere:Nowhere",
        about="",
        extra="far",
        requires=("a_package_that_is_not_there",),
        conflict="not beside near",
    )
    monkeypatch.setattr(registry, "ENTRIES", (entry, *registry.ENTRIES))
    with pytest.raises(InputMissing, match=r'pip install "amago\[far\]" \(not beside near\)'):
        make("far-away", num_envs=1, seed=0)
    assert not catalogue()[0].installed


def test_settings_models_accept_their_own_dump():
    for name in BUILT_IN:
        model = find_settings_model(name)
        assert model.model_validate(model().model_dump()) == model()


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_every_built_in_keeps_the_contract(name, check):
    check(name)


@pytest.mark.parametrize("name", BUILT_IN)
def test_seeds_and_splits_give_other_tasks(name):
    assert contract.first_tasks(name, 40, seed=0) != contract.first_tasks(name, 40, seed=1)
    assert contract.first_tasks(name, 40, seed=0, split="test") != contract.first_tasks(name, 40, seed=0)
