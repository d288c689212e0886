"""A user's own code as a source."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pipelines.config.settings import SourceSettings
from pipelines.errors import AmagoError, InputMissing, StageFailed, UsageError
from pipelines.formats.make import open_importer
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.lake.trajectory import Trajectory


def read(name: str, **settings: Any) -> list[Trajectory]:
    source = open_importer(SourceSettings(name=name, **settings))
    return [trajectory for batch in source.batches() for trajectory in batch]


def few() -> Iterator[dict[str, Any]]:
    for number in range(3):
        yield {
            "observations": {"a": np.full((number + 2, 2), number), "b": {"c": np.arange(number + 2.0)}},
            "actions": np.zeros((number + 1, 1)),
            "rewards": [1.0] * (number + 1),
            "terminated": number == 1,
            "task": f"t{number}",
            "seed": number,
            "success": number == 2,
            "tags": {"by": "hand"},
        }


ONCE = few()


def endless() -> Iterator[dict[str, Any]]:
    return itertools.cycle(few())


def failing() -> Iterator[dict[str, Any]]:
    yield from few()
    raise ValueError("out of ideas")


def uneven() -> Iterator[dict[str, Any]]:
    yield from few()
    yield {**next(few()), "rewards": [1.0, 2.0]}


def mixed() -> Iterator[dict[str, Any]]:
    yield from few()
    yield {**next(few()), "observations": {"a": np.zeros((2, 5)), "b": {"c": np.zeros(2)}}}


def words() -> Iterator[dict[str, Any]]:
    yield from few()
    yield {**next(few()), "actions": [["left"]]}


def ragged() -> Iterator[dict[str, Any]]:
    yield from few()
    yield {**next(few()), "observations": {"a": [[1], [2, 3]], "b": {"c": [0, 1]}}}


def flawed(**flaw: Any) -> Callable[[], Iterator[dict[str, Any]]]:
    def trajectories() -> Iterator[dict[str, Any]]:
        yield from few()
        yield {**next(few()), **flaw}

    return trajectories


table, misspelt = flawed(rewards=[[1.0, 2.0]]), flawed(sucess=True)
large, fraction, half_labelled = flawed(seed=2**63), flawed(seed=1.5), flawed(labels=[1])


def taught() -> Iterator[dict[str, Any]]:
    for trajectory in few():
        yield {**trajectory, "labels": [1 - action for action in trajectory["actions"]]}


def nothing() -> list[Any]:
    return []


HERE = "tests.formats.test_user"


@pytest.mark.parametrize("name", ["few", "ONCE"])
def test_own_code(name: str) -> None:
    found = read(f"{HERE}:{name}")
    assert [trajectory.length for trajectory in found] == [1, 2, 3]
    assert found[1].columns["obs.a"].tolist() == [[1, 1]] * 3
    assert found[2].columns["obs.b.c"].tolist() == [0, 1, 2, 3]
    info = found[2].info
    assert (info.task, info.seed, info.success, info.tags) == ("t2", 2, True, {"by": "hand", "episode": "2"})
    assert [int(trajectory.columns["terminated"][-1]) for trajectory in found] == [0, 1, 0]


def test_own_code_may_say_what_should_have_been_done() -> None:
    for plain, labelled in zip(read(f"{HERE}:few"), read(f"{HERE}:taught"), strict=True):
        assert labelled.columns["label"][:-1].tolist() == [1 - action for action in plain.columns["action"][1:]]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        (f"{HERE}:failing", StageFailed, "raised ValueError: out of ideas"),
        (f"{HERE}:uneven", InputMissing, "trajectory 3 has 2 rewards, 1 actions and 2 observations"),
        (f"{HERE}:mixed", InputMissing, "'obs.a' has 5 float64 values a step in trajectory 3, 2 expected"),
        (f"{HERE}:words", InputMissing, "'action' has 1 <U4 values a step"),
        (f"{HERE}:ragged", InputMissing, "trajectory 3 does not hold arrays"),
        (f"{HERE}:table", InputMissing, r"the rewards of trajectory 3 have the shape \(1, 2\), not \(1,\)"),
        (f"{HERE}:misspelt", InputMissing, "trajectory 3 has sucess, which would be lost"),
        (f"{HERE}:large", InputMissing, "the seed of trajectory 3 is 9223372036854775808"),
        (f"{HERE}:fraction", InputMissing, "the seed of trajectory 3 is 1.5"),
        (f"{HERE}:half_labelled", InputMissing, "trajectory 3 has 1 labels and 1 actions"),
        (f"{HERE}:nothing", InputMissing, "gives no trajectories"),
        (f"{HERE}:HERE", InputMissing, "trajectory 0 lacks observations"),
        (f"{HERE}:missing", InputMissing, "has no 'missing'"),
        ("hopper", UsageError, "is not a dataset.*d4rl"),
    ],
)
def test_own_code_that_is_wrong(name: str, error: type[AmagoError], words: str) -> None:
    with pytest.raises(error, match=words):
        read(name)


def test_own_code_fits_an_environment() -> None:
    wanted = Spaces(observation={"obs.a": Box(shape=(2,)), "obs.b.c": Box(shape=())}, action=Discrete(n=2))
    source = open_importer(SourceSettings(name=f"{HERE}:few"), spaces=wanted)
    (batch,) = source.batches()
    assert batch.columns["action"].dtype == np.int32
