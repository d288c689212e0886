from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pipelines.envs import make as registry
from pipelines.envs.constructor import list_parameters, refuse_wrong_parameters
from pipelines.envs.env import Env, EnvSpec
from pipelines.envs.make import catalogue, make, resolve
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, Spaces

HERE = "tests.envs.test_constructor"
SPACES = Spaces(observation={"obs": Box(shape=(1,))}, action=Discrete(n=2))


class Native(Env):
    """A class of our own interface that takes a size and a colour."""

    def __init__(self, *, num_envs, seed, split, size: int, colour="red"):
        super().__init__(num_envs=num_envs)
        self.spec = EnvSpec(name="native", spaces=SPACES)

    def reset(self, mask=None):
        return {"obs": np.zeros((self.num_envs, 1), np.float32)}

    def step(self, actions):
        raise NotImplementedError

    def tasks(self, indices):
        return ["one"] * len(indices)


def anything(**kwargs):
    raise NotImplementedError


def nothing():
    raise NotImplementedError


def problems(target, given, without=()) -> tuple[str, ...]:
    with pytest.raises(UsageError) as caught:
        refuse_wrong_parameters("own", target, given, without=without)
    return caught.value.problems


def test_what_is_required_and_what_is_unknown_is_listed_with_the_way_to_give_it():
    given = ("num_envs", "seed", "split")
    assert problems(Native, {"colr": "blue"}, given) == (
        "env.size: required; give it with -s env.size=...",
        "env.colr: no such key; did you mean 'env.colour'?",
    )
    assert problems(nothing, {"size": 1}) == ("env.size: it takes no parameters",)


def test_what_takes_anything_or_cannot_be_told_is_left_to_itself():
    refuse_wrong_parameters("own", anything, {"size": 1})
    refuse_wrong_parameters("own", dict, {"size": 1})


def test_parameters_are_listed_with_defaults_and_types():
    size, colour = list_parameters(Native, without=("num_envs", "seed", "split"))
    assert (size.name, size.required, size.about) == ("size", True, "int")
    assert (colour.name, colour.required, colour.default) == ("colour", False, "red")


@pytest.mark.parametrize("name", [f"{HERE}:Native", "tests.envs.own:Line"])
def test_a_wrong_parameter_is_a_usage_error(name):
    with pytest.raises(UsageError, match="in the configuration"):
        make(name, num_envs=1, seed=0, params={"siz": 1})


def test_the_parameters_of_a_class_of_ones_own_are_those_of_its_constructor():
    names = [parameter.name for parameter in registry.parameters(f"{HERE}:Native")]
    assert names[-2:] == ["size", "colour"]
    assert "seed" not in names


@dataclasses.dataclass
class Point:
    name: str
    value: str
    dist: object = None


def plugged(monkeypatch, **points: str) -> None:
    found = [Point(name.replace("_", "-"), value) for name, value in points.items()]
    monkeypatch.setattr(registry, "entry_points", lambda kind: found)
    monkeypatch.setattr("pipelines.registry.entry_points", lambda kind: found)


def test_an_entry_point_gives_its_name_to_what_it_makes(monkeypatch):
    plugged(monkeypatch, my_native=f"{HERE}:Native", my_line="tests.envs.own:Line")
    assert make("my-native", num_envs=1, seed=0, params={"size": 1}).spec.name == "my-native"
    line = make("my-line", num_envs=1, seed=0)
    assert (line.spec.name, line.tasks(np.arange(1))) == ("my-line", ["my-line"])
    assert resolve("my-line")[1].name == "module:attr"


@pytest.mark.parametrize("name", ["tmaze", "atari-mine"])
def test_an_entry_point_named_as_a_built_in_is_refused_with_both(name, monkeypatch):
    plugged(monkeypatch, **{name.replace("-", "_"): "tests.envs.own:Line"})
    with pytest.raises(UsageError) as caught:
        make(name, num_envs=1, seed=0)
    assert f"'{name}'" in caught.value.message
    assert "'tests.envs.own:Line'" in caught.value.message
    assert [entry.name for entry in catalogue()].count(name) <= 1
