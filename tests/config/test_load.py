from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from pipelines.config.base import SettingsModel
from pipelines.config.load import assign, fold, merge, parse_assignment, read_toml, resolve
from pipelines.errors import InputMissing, UsageError


class Maze(SettingsModel):
    corridor: int = 10
    penalty: float | None = None


def env_model(name: str) -> type[BaseModel]:
    if name != "maze":
        raise UsageError(f"unknown environment '{name}'")
    return Maze


def problems(document: dict[str, Any], *assignments: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        resolve(document, [parse_assignment(text) for text in assignments], env_model=env_model)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("train.context_length=45", ["train", "context_length"], 45),
        ("train.learning_rate=3e-4", ["train", "learning_rate"], 3e-4),
        ("evaluate.greedy=false", ["evaluate", "greedy"], False),
        ("agent.timestep.hidden=[64, 64]", ["agent", "timestep", "hidden"], [64, 64]),
        ("env.name=gym:CartPole-v1", ["env", "name"], "gym:CartPole-v1"),
        ('env.name="x"', ["env", "name"], "x"),
        ("evaluate.require=return_mean >= 1", ["evaluate", "require"], "return_mean >= 1"),
        ("about=", ["about"], ""),
    ],
)
def test_an_assignment_is_a_dotted_key_and_a_toml_value(text: str, path: list[str], value: object) -> None:
    assert parse_assignment(text) == (path, value)


@pytest.mark.parametrize("text", ["train.context_length", "=3", "train..context_length=3", ""])
def test_a_malformed_assignment_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="key=value"):
        parse_assignment(text)


def test_a_later_document_wins_key_by_key_and_neither_is_changed() -> None:
    base = {"train": {"steps": 1, "context_length": 2}, "seed": 0}
    assert merge(base, {"train": {"steps": 3}, "about": "x"}) == {
        "train": {"steps": 3, "context_length": 2},
        "seed": 0,
        "about": "x",
    }
    assert base == {"train": {"steps": 1, "context_length": 2}, "seed": 0}


def test_a_list_replaces_a_list() -> None:
    assert merge({"stages": [{"stage": "collect"}]}, {"stages": []}) == {"stages": []}


def test_another_environment_drops_the_parameters_of_the_old_one() -> None:
    base = {"env": {"name": "maze", "corridor": 5}}
    assert merge(base, {"env": {"name": "lake"}}) == {"env": {"name": "lake"}}
    assert merge(base, {"env": {"name": "maze"}}) == base
    assert merge(base, {"env": {"corridor": 6}}) == {"env": {"name": "maze", "corridor": 6}}


def test_another_sequence_encoder_drops_the_settings_of_the_old_one() -> None:
    base = {"agent": {"sequence": {"kind": "gru", "hidden": 8}, "target_tau": 0.1}}
    over = {"agent": {"sequence": {"kind": "transformer", "d_model": 8}}}
    assert merge(base, over) == {"agent": {"sequence": {"kind": "transformer", "d_model": 8}, "target_tau": 0.1}}
    document = {"agent": {"sequence": {"d_model": 8}}}  # a Transformer: the default
    assign(document, ["agent", "sequence", "kind"], "transformer")
    assert document == {"agent": {"sequence": {"kind": "transformer", "d_model": 8}}}
    assign(document, ["agent", "sequence", "kind"], "gru")
    assert document == {"agent": {"sequence": {"kind": "gru"}}}


def test_a_place_in_a_list_is_a_number() -> None:
    document: dict[str, Any] = {"stages": [{"stage": "collect"}, {"stage": "train"}]}
    assign(document, ["stages", "1", "steps"], 7)
    assert document["stages"][1] == {"stage": "train", "steps": 7}
    for place in ("2", "x", "-1"):
        with pytest.raises(UsageError, match="places"):
            assign(document, ["stages", place, "steps"], 7)


def test_a_key_inside_a_value_is_refused() -> None:
    with pytest.raises(UsageError, match="not inside a table"):
        assign({"seed": 3}, ["seed", "x"], 1)


def test_defaults_are_filled_in_for_the_environment_too() -> None:
    settings = resolve({"env": {"name": "maze"}}, [(["train", "steps"], 5)], env_model=env_model)
    assert settings.env.params == {"corridor": 10}
    assert settings.train.steps == 5
    assert settings.train.batch_size == 24


def test_resolving_the_resolved_changes_nothing() -> None:
    document = {"env": {"name": "maze", "corridor": 3}, "stages": [{"stage": "train", "steps": 2}]}
    settings = resolve(document, env_model=env_model)
    again = resolve(settings.model_dump(mode="json", exclude_none=True), env_model=env_model)
    assert again == settings


LAYERS: dict[str, Any] = {
    "stored": {"size": "base", "agent": {"timestep": {"output": 48}}, "train": {"batch_size": 7}, "seed": 1},
    "recipe": {
        "train": {"steps": 2},
        "agent": {"sequence": {"kind": "gru"}},
        "profiles": {"smoke": {"size": "tiny", "seed": 2, "agent": {"actor": {"hidden": [9]}}}, "other": {}},
    },
    "assignments": [(["profile"], "smoke"), (["train", "steps"], 3)],
}


def test_each_layer_lies_over_those_before() -> None:
    document = fold(**LAYERS)
    assert (document["seed"], document["train"]["steps"], document["train"]["batch_size"]) == (2, 3, 7)
    assert (document["size"], document["profile"], "profiles" in document) == ("tiny", "smoke", False)


def test_the_size_of_a_layer_replaces_the_network_of_the_layers_below_and_not_its_own() -> None:
    agent = fold(**LAYERS)["agent"]
    assert (agent["timestep"]["output"], agent["actor"]["hidden"], agent["sequence"]["hidden"]) == (64, [9], 64)


def test_a_size_for_a_recipe_without_one_yields_to_the_recipe() -> None:
    assert fold({"train": {"learning_rate": 0.5}}, size="tiny") == {"size": "tiny", "train": {"learning_rate": 0.5}}
    assert fold({"size": "small"}, size="tiny")["size"] == "small"


def test_folding_the_fold_changes_nothing() -> None:
    document = fold(**LAYERS)
    assert fold(document) == fold(document, LAYERS["assignments"]) == fold({}, stored=document) == document


def test_every_problem_is_found_at_once_with_the_nearest_key() -> None:
    document = {
        "env": {"name": "maze", "coridor": 3, "penalty": "low"},
        "train": {"context_lenght": 4, "steps": 0},
        "stages": [{"stage": "evaluate", "episods": 3}, {"stage": "collect", "steps": "x"}],
    }
    found = problems(document, "evaluat.episodes=3")
    keys = [line.split(":")[0] for line in found]
    assert sorted(keys) == sorted(
        [
            "train.context_lenght",
            "train.steps",
            "evaluat",
            "env.coridor",
            "env.penalty",
            "stages.0.episods",
            "stages.1.steps",
        ]
    )
    text = "\n".join(found)
    for nearest in ("'train.context_length'", "'evaluate'", "'env.corridor'", "'stages.0.episodes'"):
        assert nearest in text


def test_an_unknown_environment_is_one_problem() -> None:
    assert problems({"env": {"name": "mace", "x": 1}}) == ["env.name: unknown environment 'mace'"]


def test_parameters_without_an_environment_are_refused() -> None:
    assert problems({"env": {"corridor": 3}}) == ["env: name is not set, so its parameters are unknown: corridor"]


@pytest.mark.parametrize(
    "document", [{"env": 3}, {"stages": 3}, {"stages": [3]}, {"train": []}, {"agent": {"sequence": 3}}]
)
def test_tables_of_the_wrong_kind_are_problems_not_crashes(document: dict[str, Any]) -> None:
    assert problems(document)


def test_toml_errors_say_where(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    with pytest.raises(InputMissing, match="no configuration file"):
        read_toml(path)
    path.write_text("a = 1\nb = = 2\n")
    with pytest.raises(UsageError, match="line 2"):
        read_toml(path)
    path.write_bytes(b"a = '\xff'")
    with pytest.raises(UsageError, match="not valid TOML"):
        read_toml(path)
    with pytest.raises(InputMissing, match="cannot read"):
        read_toml(tmp_path)


def test_a_stage_entry_cannot_change_what_holds_for_the_whole_run() -> None:
    document = {"stages": [{"stage": "train", "steps": 5, "learning_rate": 1e-3}, {"stage": "collect", "actors": 2}]}
    with pytest.raises(UsageError) as refused:
        resolve(document, env_model=env_model)
    assert refused.value.problems == (
        "stages.0.learning_rate: one value holds for the whole run; set train.learning_rate",
        "stages.1.actors: one value holds for the whole run; set collect.actors",
    )


RECIPE: dict[str, Any] = {
    "epochs": 9,
    "env": {"name": "maze", "corridor": 4},
    "stages": [{"stage": "collect"}, {"stage": "train"}],
    "profiles": {
        "smoke": {"epochs": 2, "env": {"corridor": 1}, "stages": [{"stage": "collect", "steps": 5}]},
        "long": {"epochs": 90},
    },
}


def test_a_profile_lies_over_its_recipe_and_under_assignments() -> None:
    plain = resolve(RECIPE, env_model=env_model)
    assert (plain.epochs, plain.profile, len(plain.stages)) == (9, "", 2)
    chosen = [(["profile"], "smoke")]
    smoke = resolve(RECIPE, chosen, env_model=env_model)
    assert (smoke.epochs, smoke.env.params, smoke.profile) == (2, {"corridor": 1}, "smoke")
    assert [(entry.stage, entry.overrides) for entry in smoke.stages] == [("collect", {"steps": 5})]
    assert resolve(RECIPE, [(["epochs"], 3), *chosen], env_model=env_model).epochs == 3
    assert resolve(RECIPE | {"profile": "long"}, env_model=env_model).epochs == 90


def test_what_a_profile_resolved_to_resolves_to_itself() -> None:
    smoke = resolve(RECIPE, [(["profile"], "smoke")], env_model=env_model)
    document = smoke.model_dump(mode="json", exclude_none=True)
    assert resolve(document, env_model=env_model) == smoke
    assert resolve(document, [(["profile"], "smoke")], env_model=env_model) == smoke
    with pytest.raises(UsageError, match=r"no profile 'long'.*it has none"):
        resolve(document, [(["profile"], "long")], env_model=env_model)


@pytest.mark.parametrize(("name", "words"), [("smok", "did you mean 'smoke'"), ("x", "it has: smoke, long")])
def test_an_unknown_profile_is_refused_with_what_there_is(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(RECIPE, [(["profile"], name)], env_model=env_model, source="mine.toml")


def test_faults_of_a_recipe_and_of_its_profiles_are_listed_together_each_once() -> None:
    faulty = {
        "train": {"windw": 3},
        "profiles": {
            "smoke": {"env": {"coridor": 1}, "train": {"batch_size": 0}, "stages": [{"stage": "collect", "x": 1}]},
            "bad": 3,
        },
    }
    found = problems(RECIPE | faulty)
    assert [line.partition(":")[0] for line in found] == [
        "train.windw",
        "profiles.smoke.train.batch_size",
        "profiles.smoke.env.coridor",
        "profiles.smoke.stages.0.x",
        "profiles.bad",
    ]
    assert found[2].endswith("did you mean 'env.corridor'?")
    assert sorted(line.partition(":")[0] for line in problems(RECIPE | faulty, "profile=smoke")) == [
        "env.coridor",
        "profiles.bad",
        "stages.0.x",
        "train.batch_size",
        "train.windw",
    ]
    assert problems(RECIPE | {"profiles": 3}) == ["profiles: input should be a table of profiles"]


def test_of_a_profile_whose_environment_is_not_installed_the_rest_is_checked() -> None:
    def partly(name: str) -> type[BaseModel]:
        if name == "far":
            raise InputMissing("environment 'far' needs the extra 'far'")
        return env_model(name)

    document = RECIPE | {"profiles": {"far": {"env": {"name": "far", "anything": 1}, "epoch": 2}}}
    with pytest.raises(UsageError) as caught:
        resolve(document, env_model=partly)
    assert [line.partition(":")[0] for line in caught.value.problems] == ["profiles.far.epoch"]
    with pytest.raises(InputMissing, match="needs the extra"):
        resolve(document, [(["profile"], "far")], env_model=partly)


def test_the_name_of_a_stage_is_an_entry_with_its_defaults() -> None:
    short = resolve({"stages": ["collect", {"stage": "train", "steps": 3}]}, env_model=env_model)
    long = resolve({"stages": [{"stage": "collect"}, {"stage": "train", "steps": 3}]}, env_model=env_model)
    assert short == long
    changed = resolve({"stages": ["collect", "train"]}, [(["stages", "1", "steps"], 5)], env_model=env_model)
    assert changed.stages[1].overrides == {"steps": 5}
    with pytest.raises(UsageError) as refused:
        resolve({"stages": ["colect"]}, env_model=env_model)
    assert "stages.0.stage" in refused.value.problems[0]
