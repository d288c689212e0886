from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config import recipes
from pipelines.config.changes import flatten
from pipelines.config.load import accept_missing_packages, fold, resolve
from pipelines.config.model import AgentSettings
from pipelines.envs.make import requirement
from pipelines.errors import InputMissing, UsageError
from pipelines.rollout.environment import find_env_model
from pipelines.stages.run import plan

pytestmark = pytest.mark.extras
FILE = '[one]\nabout = "first"\n[two]\nabout = "second"\n'


RECIPES = recipes.read_shipped_recipes()  # read once: a parse costs as much as a test
PLANNED = [name for name, recipe in RECIPES.items() if "stages" not in recipe]  # what they leave out is chosen
WRITTEN = [name for name in RECIPES if name not in PLANNED]
PROFILES = [(name, profile) for name in WRITTEN for profile in RECIPES[name]["profiles"]]


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_resolves_and_says_what_it_is_about(name: str) -> None:
    """Parameters of an environment are looked at where its suite can be imported, everything else in any case."""
    settings = resolve(RECIPES[name], env_model=accept_missing_packages(find_env_model))
    assert settings.about
    assert len(settings.about) <= 120
    assert bool(settings.stages) != bool(settings.minutes)
    assert settings.env.name
    assert requirement(settings.env.name)
    assert "smoke" in RECIPES[name]["profiles"]


@pytest.mark.parametrize(("name", "profile"), PROFILES)
def test_every_profile_of_a_recipe_runs_all_its_stages(name: str, profile: str) -> None:
    """The same stages as the recipe, each at least once, and `best` marked before it is judged."""
    recipe = RECIPES[name]
    whole = resolve(recipe, env_model=accept_missing_packages(find_env_model))
    settings = resolve(recipe, [(["profile"], profile)], env_model=accept_missing_packages(find_env_model))
    assert settings.profile == profile
    assert settings != whole.model_copy(update={"profile": profile})
    steps = list(plan(settings))
    assert {step.entry.stage for step in steps} == {entry.stage for entry in whole.stages}
    assert {step.place for step in steps} == set(range(len(settings.stages)))
    judged = [step.settings.evaluate for step in steps if step.entry.stage == "evaluate"]
    if any(one.checkpoint == "best" for one in judged):
        assert [one.mark_best for one in judged].index(True) < [one.checkpoint for one in judged].index("best")


@pytest.mark.parametrize("name", PLANNED)
def test_a_planned_recipe_gives_at_most_three_settings(name: str) -> None:
    """Besides the environment, the budget, and words about it."""
    words = {"about", "expected", "minutes", "env", "profiles"}
    given = flatten({key: value for key, value in RECIPES[name].items() if key not in words})
    assert len(given) <= 3
    assert fold(RECIPES[name], [(["profile"], "smoke")])["minutes"] <= 0.2


@pytest.mark.parametrize("name", WRITTEN)
def test_a_smoke_profile_is_small(name: str) -> None:
    recipe = RECIPES[name]
    whole = resolve(recipe, env_model=accept_missing_packages(find_env_model))
    smoke = resolve(recipe, [(["profile"], "smoke")], env_model=accept_missing_packages(find_env_model))
    assert smoke.epochs == 2
    if "source" in recipe:
        assert 0 < smoke.source.steps <= 6400
    if any(entry.stage == "collect" for entry in smoke.stages):
        assert smoke.collect.steps <= min(whole.collect.steps, 6400)
    assert smoke.train.steps <= min(whole.train.steps, 40)
    assert smoke.evaluate.episodes <= 100


def test_a_name_a_file_and_a_table_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    assert recipes.find(str(path)) == ("mine", {"one": {"about": "first"}, "two": {"about": "second"}})
    assert recipes.find(f"{path}:two") == ("two", {"about": "second"})
    name = next(iter(recipes.read_shipped_recipes()))
    assert recipes.find(name) == (name, recipes.read_shipped_recipes()[name])


def test_a_written_configuration_has_the_name_of_its_run(tmp_path: Path) -> None:
    (tmp_path / "cartpole").mkdir()
    (tmp_path / "cartpole" / "config.toml").write_text("seed = 3")
    assert recipes.find(str(tmp_path / "cartpole" / "config.toml")) == ("cartpole", {"seed": 3})


def test_what_is_not_there_is_named_with_what_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    with pytest.raises(UsageError, match=r"no recipe 'three'.*it has: one, two"):
        recipes.find(f"{path}:three")
    with pytest.raises(UsageError, match="unknown recipe 'zzz'"):
        recipes.find("zzz")
    with pytest.raises(InputMissing, match="no configuration file"):
        recipes.find(str(tmp_path / "absent.toml"))


def test_the_recipes_are_found_inside_the_package_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "pipelines"
    package.mkdir(parents=True)
    monkeypatch.setattr(recipes.resources, "files", lambda name: package)
    with pytest.raises(InputMissing, match="install amago again"):
        recipes.find_shipped_recipes()
    (package.parent / "examples.toml").write_text("")
    assert recipes.find_shipped_recipes() == package.parent / "examples.toml"
    (package / "examples.toml").write_text("")
    assert recipes.find_shipped_recipes() == package / "examples.toml"


REFERENCES = [name for name, profile in PROFILES if profile == "reference"]


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_profile_is_amagos_agent_with_the_settings_of_its_example(name: str) -> None:
    """AMAGO's defaults are ours: what differs from them is what its example sets, or belongs to the environment."""
    settings = resolve(RECIPES[name], [(["profile"], "reference")], env_model=accept_missing_packages(find_env_model))
    defaults = AgentSettings()
    assert settings.agent.kind == "actor-critic"
    assert settings.agent.sequence.kind == "transformer"
    assert (
        settings.agent.model_copy(
            update={
                key: getattr(defaults, key)
                for key in ("acting_gamma", "gammas", "reward_scale", "target_tau", "bc_weight", "timestep", "sequence")
            }
            | {"trace_decay": defaults.trace_decay}  # without a trace it has no effect
        )
        == defaults
    )
    assert settings.train.batch_size == 24
    assert settings.train.steps == 1000
    # Each actor acts as often as there are updates; the lake's example plays its ten attempts through instead.
    steps = 250 if name == "meta-frozen-lake" else 1000
    assert settings.collect.steps == steps * settings.collect.actors
