from __future__ import annotations

from typing import Any

import pytest

from pipelines.config import recipes
from pipelines.config.load import resolve
from pipelines.config.settings import Settings
from pipelines.config.sizes import SIZES, make_preset, names_network
from pipelines.errors import UsageError
from pipelines.rollout.environment import find_env_model

KINDS = ("transformer", "gru", "mingru", "mamba", "feedforward", "identity")


def width(settings: Settings) -> tuple[int, float]:
    """Output of the timestep encoder, and the learning rate."""
    return settings.agent.timestep.output, settings.train.learning_rate


def resolved(document: dict[str, Any], *assignments: tuple[list[str], Any]) -> Settings:
    return resolve(document, assignments, env_model=find_env_model)


@pytest.mark.parametrize("kind", KINDS)
def test_base_equals_the_defaults(kind: str) -> None:
    document = {"agent": {"sequence": {"kind": kind}}}
    assert resolved(document | {"size": "base"}) == resolved(document).model_copy(update={"size": "base"})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_every_size_of_every_encoder_is_valid(size: str, kind: str) -> None:
    settings = resolved({"size": size, "agent": {"sequence": {"kind": kind}}})
    assert settings.agent.sequence.kind == kind
    assert settings.size == size


def test_what_a_document_sets_itself_overrides_its_size() -> None:
    settings = resolved({"size": "tiny", "agent": {"timestep": {"output": 48}}, "train": {"learning_rate": 2e-3}})
    assert width(settings) == (48, 2e-3)
    assert settings.agent.actor.hidden == (128, 128)


def test_a_size_given_as_an_option_overrides_the_document_and_not_the_other_options() -> None:
    document = {"size": "base", "agent": {"timestep": {"output": 48}, "sequence": {"d_model": 8, "num_heads": 1}}}
    settings = resolved(document, (["size"], "tiny"), (["train", "learning_rate"], 0.5))
    assert width(settings) == (64, 0.5)
    other = resolved(document, (["size"], "tiny"), (["agent", "sequence", "kind"], "gru"))
    assert other.agent.sequence.model_dump()["hidden"] == 64


def test_a_size_of_a_profile_overrides_the_recipe_and_not_the_profile() -> None:
    recipe = {
        "agent": {"timestep": {"output": 48}, "actor": {"hidden": [4]}},
        "profiles": {"smoke": {"size": "tiny", "agent": {"actor": {"hidden": [9]}}}},
    }
    settings = resolved(recipe, (["profile"], "smoke"))
    assert (settings.agent.timestep.output, settings.agent.actor.hidden) == (64, (9,))


def test_a_wrong_size_is_named() -> None:
    with pytest.raises(UsageError) as error:
        resolved({"size": "tiniest"})
    assert error.value.problems[0].startswith("size: ")


def test_widths_and_depths_are_settings_of_the_network_and_its_kind_is_not() -> None:
    assert not names_network({"agent": {"sequence": {"kind": "gru"}, "gammas": [0.9]}, "train": {"context_length": 3}})
    assert names_network({"agent": {"sequence": {"kind": "gru", "hidden": 8}}})
    base = make_preset("base", "transformer")
    assert names_network(base)
    assert not names_network(base, changed=True)
    assert names_network(make_preset("tiny", "transformer"), changed=True)


@pytest.mark.parametrize("name", recipes.read_shipped_recipes())
def test_every_recipe_says_how_large_its_network_is(name: str) -> None:
    recipe = recipes.read_shipped_recipes()[name]
    is_planned = "stages" not in recipe  # its size follows from the budget
    assert is_planned or recipe.get("size") or names_network(recipe), "without a GPU another network would be chosen"
