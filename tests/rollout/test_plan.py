from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.settings import LakeSettings
from pipelines.envs.make import make
from pipelines.rollout.plan import CollectionPlan, EvaluationPlan, NamedPolicy, RunName
from pipelines.rollout.rollout import Cutting
from tests.stages.recipes import tiny


def plan_of(*, behaviour: dict[str, Any] | None = None, number: int | None = None, **tables: Any) -> CollectionPlan:
    settings = tiny(**{"collect": {"workers": 0}, **tables})
    return CollectionPlan(settings=settings, place=Path("lake"), name="c", behaviour=behaviour, number=number)


def test_a_share_travels_to_another_process_and_leaves_the_lake_to_its_driver() -> None:
    policy, run = NamedPolicy("random", False, ""), RunName(path=Path("run"), identity="run-1")
    plan = plan_of(lake={"max_steps": 9}).share(1, name="c.1", before=3, policy=policy, run=run)
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert (again.number, again.before, again.policy, again.run) == (1, 3, policy, run)
    assert again.settings.lake == LakeSettings(compact=False)
    assert Path(again.place).is_absolute()


@pytest.mark.parametrize(
    ("chunk_steps", "context", "horizon", "in_chain", "cutting"),
    [
        (0, 4, None, True, Cutting()),
        ("auto", 4, 32, True, Cutting(steps=0, kept=32, context=4)),  # no episode is longer than eight contexts
        ("auto", 4, 33, True, Cutting(steps=32, kept=32, context=4)),
        ("auto", 4, None, False, Cutting(steps=32, kept=32)),
        (7, 4, 5, False, Cutting(steps=7, kept=32)),
        (7, "auto", 5, True, Cutting(steps=7, kept=40, context=5)),
    ],
)
def test_long_episodes_are_cut_by_the_context_length(
    chunk_steps: Any, context: Any, horizon: int | None, in_chain: bool, cutting: Cutting
) -> None:
    tables = {"collect": {"chunk_steps": chunk_steps, "workers": 0}, "train": {"context_length": context}}
    assert plan_of(behaviour=None if in_chain else {}, **tables).choose_cutting(horizon) == cutting


@pytest.mark.parametrize(
    ("explore", "in_chain", "explores"),
    [("auto", True, True), ("auto", False, False), (True, False, True), (False, True, False)],
)
def test_only_a_chain_explores_unless_the_settings_say_so(explore: Any, in_chain: bool, explores: bool) -> None:
    plan = plan_of(behaviour=None if in_chain else {}, collect={"explore": explore, "workers": 0})
    spec = make("tmaze", num_envs=1, seed=0).spec
    assert (plan.make_exploration(spec, seed=0, before=0) is not None) == explores


def test_shares_of_an_evaluation_are_all_of_its_actors() -> None:
    plan = EvaluationPlan(settings=tiny(evaluate={"episodes": 9, "actors": 7}), checkpoint=None)  # type: ignore[arg-type]
    for count in (1, 2, 3, 7):
        shares = plan.share(count)
        assert [actor for share in shares for actor in range(7)[share.place or slice(0)]] == list(range(7))
        assert {share.sharers for share in shares} == {count}
