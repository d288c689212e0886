import pytest
from pydantic import TypeAdapter, ValidationError

from pipelines.config.model import AgentSettings, SequenceSettings
from pipelines.errors import UsageError
from tests.learning.factories import agent


def test_defaults_are_those_of_the_specification():
    settings = AgentSettings()
    assert (*settings.gammas, settings.acting_gamma) == (0.1, 0.9, 0.95, 0.97, 0.99, 0.995, 0.999)
    assert (settings.reward_scale, settings.target_tau) == (10, 0.003)
    assert (settings.sequence.d_model, settings.sequence.num_layers, settings.sequence.num_heads) == (256, 3, 8)


def test_settings_survive_a_round_trip():
    settings = AgentSettings.model_validate({"sequence": {"kind": "gru", "hidden": 32}, "gammas": [0.5]})
    assert AgentSettings.model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize("wrong", [
    {"sequence": {"kind": "transfomer"}},
    {"sequence": {"kind": "gru", "d_model": 3}},
    {"sequence": {"d_model": 30, "num_heads": 4}},
    {"sequence": {"d_model": 12, "num_heads": 4, "position": "rope"}},
    {"timestep": {"kind": "nope"}},
    {"timestep": {"options": {"x": 1}}},
    {"critic": {"ensemble": 2, "subset": 3}},
    {"gammas": [1.0]},
    {"filter": {"kind": "nope"}},
    {"kind": "nope"},
    {"auxiliary_losses": [{"kind": "nope"}]},
    {"critic": {"low": 1.0, "high": 1.0}},
    {"critic": {"bins": 1}},
    {"actor": {"distribution": "gauss"}},
    {"unknown": 1},
])  # fmt: skip
def test_faults_are_refused(wrong):
    with pytest.raises(ValidationError):
        AgentSettings.model_validate(wrong)


def test_every_setting_is_documented():
    def fields(schema):
        for definition in schema["$defs"].values():
            yield from (definition.get("properties") or {}).items()

    schema = AgentSettings.model_json_schema()
    undocumented = [name for name, field in fields(schema) if "description" not in field and name != "kind"]
    assert undocumented == []


def test_a_plug_in_that_is_not_there_is_named():
    settings = TypeAdapter(SequenceSettings).validate_python({"kind": "nowhere:Thing"})
    assert settings.kind == "nowhere:Thing"
    with pytest.raises(UsageError, match="unexpected keyword"):
        agent(filter={"kind": "binary", "options": {"x": 1.0}})
