"""The context length that suits the environment, and the environment that a shared lake was filled in."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config.load import resolve
from pipelines.config.recipes import read_shipped_recipes
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.errors import InputMissing
from pipelines.events import Event, Notice
from pipelines.lake import collectors
from pipelines.lake.store import Lake
from pipelines.learning import checkpoint as checkpoints
from pipelines.rollout.environment import find_env_model, make_env
from pipelines.stages import collect, evaluate, train
from pipelines.stages import run as chain
from pipelines.stages.resolve import with_window
from tests.stages.recipes import tiny


def warnings(heard: list[Event]) -> list[str]:
    return [event.text for event in heard if isinstance(event, Notice) and event.level == "warning"]


def window(run: Path) -> int:
    return checkpoints.load(RunDirectory(run).checkpoints).record["context_length"]


@pytest.mark.parametrize(
    ("train", "kind", "horizon", "expected", "warned"),
    [
        ({}, "transformer", 34, 34, False),
        ({}, "transformer", 256, 256, False),
        ({}, "transformer", 1500, 256, True),
        ({}, "gru", 1500, 256, True),
        ({}, "feedforward", 1500, 256, False),
        ({}, "transformer", None, 128, False),
        ({"burn_in": 40}, "gru", 34, 41, False),
        ({"context_length": 21}, "transformer", 34, 21, True),
        ({"context_length": 21}, "transformer", 21, 21, False),
        ({"context_length": 300}, "transformer", 1500, 300, True),
    ],
)
def test_the_window_is_the_horizon_up_to_a_bound(
    train: dict, kind: str, horizon: int | None, expected: int, warned: bool
) -> None:
    heard: list[Event] = []
    settings = Settings.model_validate({"train": train, "agent": {"sequence": {"kind": kind}}})
    assert with_window(settings.train, settings.agent, horizon, heard.append).context_length == expected
    assert len(warnings(heard)) == warned
    assert not warned or (f"{expected:,}" in warnings(heard)[0] and f"{horizon:,}" in warnings(heard)[0])


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("quickstart", 50),
        ("meta-frozen-lake", 45),
        ("tmaze", 21),
        ("dark-key-door", 65),
        ("dark-room", 200),
        ("bandit", 100),
        ("alchemy", 200),
        ("mazerunner", 250),
    ],
)
def test_recipes_of_the_built_in_environments_see_whole_episodes(recipe: str, expected: int) -> None:
    settings = resolve(read_shipped_recipes()[recipe], env_model=find_env_model)
    env = make_env(settings.env, actors=1, seed=0)
    heard: list[Event] = []
    assert settings.train.context_length == "auto"
    assert with_window(settings.train, settings.agent, env.spec.horizon, heard.append).context_length == expected
    assert not heard


@pytest.mark.system
def test_a_longer_corridor_is_seen_whole_by_a_chain_and_by_train(tmp_path: Path) -> None:
    long = tiny(env={"corridor": 33}, train={"context_length": "auto", "steps": 2}, collect={"steps": 160})
    stages = long.model_copy(update={"stages": tiny(stages=[{"stage": "collect"}, {"stage": "train"}]).stages})
    chain.run(stages, run=tmp_path / "chain")
    assert window(tmp_path / "chain") == 34
    assert RunDirectory(tmp_path / "chain").load_document()["train"]["context_length"] == 34
    assert chain.run(stages, run=tmp_path / "chain").status == "skipped"
    collect.run(long, lake=tmp_path / "lake")
    train.run(
        nowhere(train={"context_length": "auto", "steps": 2}), run=tmp_path / "run", lakes=[(tmp_path / "lake", 1.0)]
    )
    assert window(tmp_path / "run") == 34


@pytest.mark.system
def test_a_training_goes_on_with_the_window_that_it_began_with(tmp_path: Path) -> None:
    auto = tiny(train={"context_length": "auto", "steps": 2})
    collect.run(tiny(), lake=tmp_path / "lake")
    train.run(auto, run=tmp_path / "run", lakes=[(tmp_path / "lake", 1.0)])
    collect.run(tiny(env={"corridor": 9}), lake=tmp_path / "lake")
    more = tiny(train={"context_length": "auto", "steps": 3})
    assert train.run(more, run=tmp_path / "run", lakes=[(tmp_path / "lake", 1.0)]).metrics["updates_done"] == 1
    assert window(tmp_path / "run") == 5


def nowhere(**tables: dict) -> Settings:
    """Settings of a training that names no environment."""
    settings = tiny(**tables)
    return settings.model_copy(update={"env": type(settings.env)()})


@pytest.mark.system
def test_a_training_on_a_shared_lake_knows_its_environment(tmp_path: Path) -> None:
    collect.run(tiny(env={"corridor": 7}), lake=tmp_path / "lake")
    train.run(nowhere(), run=tmp_path / "run", lakes=[(tmp_path / "lake", 1.0)])
    document = RunDirectory(tmp_path / "run").load_document()
    assert (document["env"]["name"], document["env"]["corridor"]) == ("tmaze", 7)
    heard: list[Event] = []
    wanted = resolve({**document, "evaluate": {"episodes": 2}}, env_model=find_env_model)
    assert evaluate.run(wanted, run=tmp_path / "run", listener=heard.append).metrics["length_mean"] == 8.0
    assert warnings(heard) == []


@pytest.mark.system
def test_an_evaluation_elsewhere_than_in_training_is_told(tmp_path: Path) -> None:
    collect.run(tiny(), lake=tmp_path / "lake")
    train.run(nowhere(), run=tmp_path / "run", lakes=[(tmp_path / "lake", 1.0)])
    heard: list[Event] = []
    evaluate.run(tiny(env={"corridor": 7}), run=tmp_path / "run", listener=heard.append)
    assert warnings(heard) == [
        "evaluated in another environment than the agent was trained in: env.corridor is 7, not 4"
    ]


@pytest.mark.system
def test_several_environments_of_a_lake_are_told(tmp_path: Path) -> None:
    for corridor in (4, 7):
        collect.run(tiny(env={"corridor": corridor}), lake=tmp_path / "lake")
    heard: list[Event] = []
    train.run(nowhere(), run=tmp_path / "run", lakes=[(tmp_path / "lake", 1.0)], listener=heard.append)
    assert RunDirectory(tmp_path / "run").load_document()["env"]["name"] == ""
    assert "2 environments" in warnings(heard)[0]
    assert "evaluate will need --env" in warnings(heard)[0]
    heard.clear()
    train.run(tiny(env={"corridor": 5}), run=tmp_path / "b", lakes=[(tmp_path / "lake", 1.0)], listener=heard.append)
    assert "not in 'tmaze'" in warnings(heard)[0]


@pytest.mark.system
def test_the_environment_of_a_foreign_lake_is_not_imported(tmp_path: Path) -> None:
    collect.run(tiny(), lake=tmp_path / "lake")
    lake = Lake(tmp_path / "lake")
    (name,) = collectors.read_all(lake)
    record = collectors.read(lake, name)
    assert record is not None
    collectors.write(lake, {**record, "env": {"name": "no_such_module_anywhere:Env"}, "horizon": None})
    train.run(nowhere(), run=tmp_path / "run", lakes=[(tmp_path / "lake", 1.0)])
    assert RunDirectory(tmp_path / "run").load_document()["env"]["name"] == "no_such_module_anywhere:Env"
    with pytest.raises(InputMissing):
        evaluate.run(
            resolve(RunDirectory(tmp_path / "run").load_document(), env_model=find_env_model), run=tmp_path / "run"
        )
