"""The table of choices: whatever was measured, it is a recipe that fits the budget, and the user's settings stand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config.load import merge, resolve
from pipelines.config.settings import Settings
from pipelines.envs.goals import GoalReward
from pipelines.rollout.environment import find_env_model
from pipelines.stages.choices import Budget, Choices, DataFacts, EnvFacts, Rates
from pipelines.stages.plan import plan
from tests.tiers import examples

CARTPOLE = EnvFacts(
    name="gym:CartPole-v1",
    action="Discrete",
    observation_size=4,
    horizon=500,
    episodes=64,
    length_mean=22,
    length_min=9,
    length_max=70,
    return_mean=22.0,
    return_error=1.0,
    observation_max=3.1,
    reward_max=1.0,
    step_seconds=1e-5,
)
QUIZ = replace(CARTPOLE, rewards_at_once=True, forgets_actions=True)
LAKE = EnvFacts(
    name="meta-frozen-lake",
    action="Discrete",
    observation_size=4,
    horizon=50,
    num_attempts=5,
    has_success=True,
    one_by_one=False,
    episodes=640,
    length_mean=38,
    length_min=5,
    length_max=50,
    observation_max=1.0,
    reward_max=1.0,
    step_seconds=1e-6,
)
PENDULUM = EnvFacts(
    name="gym:Pendulum-v1",
    action="Box",
    observation_size=3,
    horizon=200,
    episodes=64,
    length_mean=200,
    length_min=200,
    length_max=200,
    observation_max=8.0,
    reward_max=16.0,
    step_seconds=2e-5,
)
CHEETAH = replace(PENDULUM, name="gym:HalfCheetah-v5", action_size=6, horizon=1_000, length_mean=1_000)
COSTLY = replace(CHEETAH, length_min=1_000, length_max=1_000, only_costs=True, return_mean=-500.0)
REACHED = GoalReward(tolerance=0.05, reward=0.0, step_reward=-1.0, ends=False)
RATES = Rates(update_seconds=0.018, collect_seconds=1e-4)
DATA = DataFacts(trajectories=100, steps=20_000, total_steps=20_000, is_whole=True, return_mean=10.0, return_high=40.0)

lengths = st.integers(1, 30_000)
facts = st.builds(
    lambda horizon, seen, action, attempts, **more: EnvFacts(
        name="tmaze",
        action=action,
        observation_size=4,
        horizon=horizon,
        num_attempts=attempts,
        length_mean=float(min(seen, horizon or seen)),
        length_min=min(seen, horizon or seen),
        length_max=min(seen, horizon or seen),
        **more,
    ),
    st.none() | lengths,
    lengths,
    st.sampled_from(("Discrete", "Box", "MultiDiscrete", "MultiBinary")),
    st.sampled_from((None, 1, 5)),
    episodes=st.integers(0, 5),
    one_by_one=st.booleans(),
    has_images=st.booleans(),
    has_text=st.booleans(),
    has_gpu=st.booleans(),
    observation_max=st.floats(0, 1e6),
    observation_min=st.floats(0, 1e6),
    reward_max=st.floats(0, 1e6),
    rewards_at_once=st.booleans(),
    forgets_actions=st.booleans(),
    shows_state=st.sampled_from((None, False, True)),
    step_seconds=st.floats(1e-7, 0.1),
)
rates = st.builds(Rates, update_seconds=st.floats(1e-3, 2), collect_seconds=st.floats(1e-6, 0.05))


def chosen(seen: EnvFacts, budget: Budget, rate: Rates | None = RATES, **given: object) -> tuple[Choices, float | None]:
    choices = Choices(given, seen, budget)
    choices.choose_agent()
    expected = choices.choose_schedule(None if budget.steps else rate, spent=5.0)
    return choices, expected


def settings_of(choices: Choices) -> Settings:
    document = merge(choices.document(), choices.given)
    return resolve(merge({"env": {"name": "tmaze"}}, document), env_model=find_env_model)


def totals(settings: Settings) -> tuple[int, int]:
    """Environment steps and updates of the whole run."""
    steps = plan(settings)
    return tuple(max(step.target for step in steps if step.entry.stage == stage) for stage in ("collect", "train"))  # type: ignore[return-value]


@examples(100)
@given(facts, rates, st.floats(0.01, 5_000), st.booleans())
def test_every_table_is_a_recipe_whose_first_epoch_stores_something_of_every_actor(
    seen: EnvFacts, rate: Rates, minutes: float, pieces: bool
) -> None:
    collect = {} if pieces else {"collect": {"chunk_steps": 0}}
    settings = settings_of(chosen(seen, Budget(minutes=minutes), rate, **collect)[0])
    steps = plan(settings)
    assert {step.entry.stage for step in steps if step.epoch == 0} >= {"collect", "train", "evaluate"}
    actors = settings.collect.actors
    assert isinstance(actors, int)
    assert steps[0].target >= actors * (1 if pieces else seen.longest)
    assert steps[-1].is_final
    assert steps[-1].settings.evaluate.checkpoint == "best"


@examples(100)
@given(facts, st.integers(1, 10**8))
def test_a_budget_in_steps_is_used_exactly(seen: EnvFacts, steps: int) -> None:
    settings = settings_of(chosen(seen, Budget(steps=steps))[0])
    assert totals(settings)[0] == steps


@examples(100)
@given(facts, st.integers(1, 10**8), st.integers(1, 10**6), st.booleans())
def test_a_budget_in_steps_is_used_exactly_where_the_steps_or_number_of_epochs_are_given(
    seen: EnvFacts, steps: int, amount: int, of_epoch: bool
) -> None:
    given: dict[str, Any] = (
        {"collect": {"steps": amount}} if of_epoch else {"epochs": max(min(amount, steps // 1000), 1)}
    )
    settings = settings_of(chosen(seen, Budget(steps=steps), **given)[0])
    assert totals(settings)[0] == steps
    if of_epoch:
        assert settings.collect.steps == amount
    else:
        assert settings.epochs == given["epochs"]


@examples(100)
@given(facts, rates, st.floats(0.5, 1_000))
def test_twice_the_time_is_never_fewer_steps_or_updates(seen: EnvFacts, rate: Rates, minutes: float) -> None:
    short, long = (settings_of(chosen(seen, Budget(minutes=minutes * more), rate)[0]) for more in (1, 2))
    for less, more in zip(totals(short), totals(long), strict=True):
        assert more >= 0.9 * less  # rounding, and another number of actors


@pytest.mark.parametrize("seen", [CARTPOLE, LAKE, PENDULUM])
@pytest.mark.parametrize("minutes", [1, 2, 5, 15, 60, 600])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"train": {"steps": 40}},
        {"collect": {"steps": 1280}},
        {"train": {"steps": 60}, "collect": {"steps": 640}},
        {"epochs": 7},
    ],
    ids=["nothing given", "updates given", "steps given", "both given", "epochs given"],
)
def test_the_plan_fills_its_time(seen: EnvFacts, minutes: float, given: dict[str, Any]) -> None:
    choices, expected = chosen(seen, Budget(minutes=minutes), **given)
    assert expected == pytest.approx(60 * minutes, rel=0.12 if "epochs" in given else 0.08)  # rounded to two digits
    settings = settings_of(choices)
    assert [settings.epochs] == [given.get("epochs", settings.epochs)]
    for stage, amount in (("train", settings.train.steps), ("collect", settings.collect.steps)):
        assert amount == given.get(stage, {}).get("steps", amount)
    steps, updates = totals(settings)
    evaluated = sum(step.settings.evaluate.episodes for step in plan(settings) if step.entry.stage == "evaluate")
    spent = 1.1 * (updates * RATES.update_seconds + steps * RATES.collect_seconds)
    spent += RATES.collect_seconds * seen.typical * evaluated
    assert 0.7 * 60 * minutes < spent < 1.02 * 60 * minutes


def test_evaluations_of_long_slow_episodes_leave_most_of_a_short_budget() -> None:
    slow = replace(PENDULUM, horizon=1_000, length_mean=1_000, length_min=1_000, length_max=1_000, step_seconds=1e-3)
    rates = Rates(update_seconds=0.03, collect_seconds=1e-3)
    settings = settings_of(chosen(slow, Budget(minutes=1.7), rates)[0])
    evaluated = sum(step.settings.evaluate.episodes for step in plan(settings) if step.entry.stage == "evaluate")
    assert evaluated * slow.horizon * rates.collect_seconds <= 0.3 * 60 * 1.7


@pytest.mark.parametrize("minutes", [1, 5, 60, 6_000])
def test_the_first_score_comes_within_a_minute(minutes: float) -> None:
    settings = settings_of(chosen(CARTPOLE, Budget(minutes=minutes))[0])
    first = list(itertools.takewhile(lambda step: step.epoch == 0, plan(settings)))
    (evaluation,) = [step.settings.evaluate for step in first if step.entry.stage == "evaluate"][:1]
    target = {step.entry.stage: step.target for step in first}
    seconds = target["collect"] * RATES.collect_seconds + target["train"] * RATES.update_seconds
    assert seconds + evaluation.episodes * CARTPOLE.typical * RATES.collect_seconds < 45


def test_what_the_user_gives_stands_and_the_rest_follows_from_it() -> None:
    choices, _ = chosen(CARTPOLE, Budget(minutes=5), train={"context_length": 64, "steps": 7}, collect={"actors": 2})
    settings = settings_of(choices)
    assert (settings.train.context_length, settings.train.batch_size) == (64, 8)
    assert settings.train.steps == 7
    assert settings.collect.actors == 2
    given = {row.setting for row in choices.rows if row.given}
    assert given == {"train.context_length", "train.steps", "collect.actors"}
    assert not given & flat(choices.document()).keys()
    assert settings.train.decay_steps == 7 * settings.epochs


@pytest.mark.parametrize(("steps", "rate"), [(12_000, 1e-3), (750_000, 5e-4), (100_000_000, 1e-4)])
def test_the_learning_rate_is_larger_in_a_shorter_run(steps: int, rate: float) -> None:
    settings = settings_of(chosen(CARTPOLE, Budget(steps=steps))[0])
    assert settings.train.learning_rate == pytest.approx(rate, rel=0.05)


def test_a_run_that_begins_with_weights_keeps_the_usual_learning_rate() -> None:
    choices, _ = chosen(CARTPOLE, Budget(steps=12_000), init={"source": "runs/other"})
    assert "train.learning_rate" not in {row.setting for row in choices.rows}


def flat(document: dict, prefix: str = "") -> dict:
    found: dict = {}
    for key, value in document.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def test_auto_is_left_to_the_run() -> None:
    choices, _ = chosen(CARTPOLE, Budget(minutes=1), train={"context_length": "auto"}, collect={"actors": "auto"})
    settings = settings_of(choices)
    assert (settings.train.context_length, settings.collect.actors) == ("auto", "auto")


def test_another_encoder_gets_no_settings_of_a_transformer() -> None:
    choices, _ = chosen(LAKE, Budget(minutes=1), agent={"sequence": {"kind": "gru"}})
    settings = settings_of(choices)
    assert (settings.agent.sequence.kind, settings.train.optimizer) == ("gru", "adamw")


def test_muon_is_not_chosen_where_a_rank_has_rows_of_a_matrix_or_actions_are_a_density() -> None:
    for seen, train in ((LAKE, {"sharding": "fsdp"}), (CHEETAH, {})):
        settings = settings_of(chosen(seen, Budget(minutes=1), train=train)[0])
        assert (settings.agent.sequence.kind, settings.train.optimizer) == ("transformer", "adamw")


@pytest.mark.parametrize("actor", [{"distribution": "beta"}, {"distribution": "grid"}])
def test_the_users_distribution_of_actions_decides_what_follows(actor: dict[str, object]) -> None:
    for seen in (PENDULUM, CHEETAH):
        agent = settings_of(chosen(seen, Budget(minutes=5), agent={"actor": actor})[0]).agent
        assert agent.actor.distribution == actor["distribution"]
        assert agent.trace == ("retrace" if actor["distribution"] == "grid" else "none")


@pytest.mark.parametrize(
    ("step_change", "inertia", "longest", "repeat"),
    [
        (0.05, 1.0, 1_000, 4),
        (0.09, 1.0, 1_000, 2),
        (0.11, 1.0, 200, 2),
        (0.14, 1.0, 1_000, 1),
        (0.01, 1.0, 250, 2),  # an episode has 100 decisions at least
        (0.01, 1.0, 150, 1),
        (0.05, 0.1, 1_000, 1),  # a point that is moved at once
        (0.2, 1.0, 1_000, 1),
        (0.0, 0.0, 1_000, 1),  # nothing moves, or nothing is known
        (1e-320, 1.0, 1_000, 4),
    ],
)
def test_actions_are_repeated_where_steps_are_fine(
    step_change: float, inertia: float, longest: int, repeat: int
) -> None:
    seen = replace(CHEETAH, step_change=step_change, inertia=inertia, horizon=longest)
    assert seen.best_repeat == repeat


@pytest.mark.parametrize(("pays_alike", "length", "share"), [(True, 22, 0.0625), (True, 300, 0.25), (False, 22, 0.25)])
def test_few_episodes_explore_where_only_the_length_of_an_episode_pays(
    pays_alike: bool, length: int, share: float
) -> None:
    seen = replace(CARTPOLE, pays_alike=pays_alike, length_mean=length)
    assert settings_of(chosen(seen, Budget(minutes=2))[0]).exploration.explorers == share


def test_a_sequence_encoder_of_ones_own_is_kept() -> None:
    seen = replace(CARTPOLE, shows_state=True)
    choices, _ = chosen(seen, Budget(minutes=2), agent={"sequence": {"num_layers": 1}})
    assert settings_of(choices).agent.sequence.kind == "transformer"


def test_later_attempts_explore_less() -> None:
    several = settings_of(chosen(LAKE, Budget(minutes=2))[0]).exploration
    assert (several.kind, several.explorers) == ("bilevel", 0.0)
    endless = replace(LAKE, horizon=None, num_attempts=None)
    assert settings_of(chosen(endless, Budget(minutes=2))[0]).exploration.kind == "plain"


def test_a_budget_counts_the_steps_of_the_environment() -> None:
    choices, _ = chosen(replace(CHEETAH, action_repeat=4), Budget(steps=80_000))
    settings = settings_of(choices)
    assert settings.env.params["action_repeat"] == 4
    assert totals(settings)[0] == 20_000


def test_a_batch_can_be_shared_among_ranks() -> None:
    choices, _ = chosen(LAKE, Budget(minutes=1), train={"ranks": 3, "grad_accumulation": 2})
    assert settings_of(choices).train.batch_size % 6 == 0


@pytest.mark.parametrize(
    ("seen", "setting", "value"),
    [
        (LAKE, "train.context_length", 50),
        (CARTPOLE, "train.context_length", 32),
        (replace(CARTPOLE, shows_state=True), "train.context_length", 32),
        (replace(CARTPOLE, shows_state=False), "train.context_length", 128),
        (replace(CARTPOLE, horizon=8, length_max=8), "train.batch_size", 64),
        (LAKE, "collect.actors", 128),
        (CARTPOLE, "collect.actors", 16),
        (PENDULUM, "agent.actor.distribution", "grid"),
        (PENDULUM, "agent.actor.grid_points", 5),
        (PENDULUM, "agent.trace", "retrace"),
        (PENDULUM, "exploration.start", 1.0),
        (CHEETAH, "agent.n_step", 3),
        (CHEETAH, "agent.acting_gamma", 0.99),
        (replace(CHEETAH, length_min=20), "agent.acting_gamma", 0.999),
        (CHEETAH, "train.context_length", 8),
        (replace(CHEETAH, shows_state=True), "agent.sequence.kind", "identity"),
        (replace(CARTPOLE, shows_state=True), "agent.sequence.kind", "identity"),
        (LAKE, "train.optimizer", "muon"),
        (CHEETAH, "train.batch_size", 16),
        (CARTPOLE, "agent.trace", "retrace"),
        (QUIZ, "agent.acting_gamma", 0.1),
        (QUIZ, "agent.gammas", []),
        (replace(QUIZ, horizon=52), "train.batch_size", 24),
        (QUIZ, "train.batch_size", 8),
        (replace(QUIZ, horizon=50), "agent.sequence.position", "both"),
        (replace(QUIZ, horizon=207), "train.context_length", 207),
        (replace(QUIZ, horizon=207), "train.batch_size", 12),
        (replace(QUIZ, horizon=207), "agent.sequence.position", "both"),
        (replace(QUIZ, horizon=1_025), "train.context_length", 32),
        (replace(QUIZ, horizon=400, rewards_at_once=False), "train.context_length", 400),  # a bandit
        (replace(QUIZ, horizon=400, rewards_at_once=False), "agent.acting_gamma", 0.9975),
        (replace(QUIZ, horizon=None, length_min=300, length_max=300), "train.context_length", 300),
        (replace(CARTPOLE, length_min=6, length_max=6), "train.context_length", 6),  # though 500 are possible
        (replace(CARTPOLE, horizon=50), "agent.sequence.position", "rope"),
        (CARTPOLE, "agent.acting_gamma", 0.998),
        (CARTPOLE, "exploration.persistence", 8.0),
        (replace(CARTPOLE, return_error=0.0), "exploration.persistence", 32.0),
        (replace(CARTPOLE, return_error=0.0, has_images=True), "exploration.persistence", 8.0),
        (LAKE, "agent.timestep.normalize", False),
        (PENDULUM, "agent.timestep.normalize", True),
        (replace(CARTPOLE, observation_max=1.2, observation_min=0.05), "agent.timestep.normalize", True),
        (replace(CARTPOLE, observation_max=1.2, observation_min=0.3), "agent.timestep.normalize", False),
        (CHEETAH, "exploration.start", 0.5),
        (replace(LAKE, has_goal_rule=True), "train.relabel.relabeler", ["hindsight"]),
        (replace(LAKE, has_goal_sequence=True), "train.relabel.relabeler", ["instruction:some"]),
        (replace(LAKE, has_goal_sequence=True), "train.relabel.share", 1.0),
        (replace(PENDULUM, goal_reward=REACHED), "train.relabel.goal.tolerance", 0.05),
        (replace(PENDULUM, goal_reward=REACHED), "train.relabel.goal.step_reward", -1.0),
    ],
)
def test_rows_follow_from_what_was_measured(seen: EnvFacts, setting: str, value: object) -> None:
    rows = {row.setting: row.value for row in chosen(seen, Budget(minutes=5))[0].rows}
    assert rows[setting] == value


@pytest.mark.parametrize(
    ("seen", "start"),
    [
        (COSTLY, -0.5),
        (replace(COSTLY, length_min=900), None),
        (replace(COSTLY, only_costs=False), None),
        (replace(COSTLY, episodes=0), None),
        (replace(PENDULUM, only_costs=True, return_mean=-1200.0), None),
    ],
    ids=["ended by time", "ended early", "paid, too", "none ended", "with traces"],
)
def test_values_start_at_what_random_play_costs(seen: EnvFacts, start: float | None) -> None:
    rows = {row.setting: row.value for row in chosen(seen, Budget(minutes=5))[0].rows}
    assert rows.get("agent.popart.reward_mean") == start


@pytest.mark.parametrize("seen", [CARTPOLE, PENDULUM, COSTLY, LAKE], ids=lambda seen: seen.name)
@pytest.mark.parametrize(
    "agent",
    [{"kind": "multi-task"}, {"critic": {"kind": "two-hot"}}, {"kind": "behaviour-cloning"}],
    ids=["multi-task", "two-hot", "cloning"],
)
def test_an_agent_of_another_kind_is_given_only_what_it_can_use(seen: EnvFacts, agent: dict[str, Any]) -> None:
    rows = {row.setting: row.value for row in chosen(seen, Budget(minutes=5), agent=agent)[0].rows}
    scalar_alone = {"trace", "trace_decay", "entropy_weight", "popart.reward_mean", "actor.distribution"}
    assert not rows.keys() & {f"agent.{name}" for name in scalar_alone}
    with_critics = agent.get("kind") != "behaviour-cloning"
    of_critics = {"agent.n_step", "agent.acting_gamma", "agent.gammas", "agent.target_tau"}
    assert rows.keys() & of_critics == (of_critics if with_critics else set())


@pytest.mark.parametrize(
    ("seen", "agent", "follows_values_alone"),
    [
        (COSTLY, {}, True),
        (replace(COSTLY, only_costs=False), {}, True),
        (replace(COSTLY, length_min=900), {}, False),
        (replace(COSTLY, num_attempts=3), {}, False),
        (replace(COSTLY, action_size=1), {}, False),
        (replace(COSTLY, action="Discrete", action_size=1), {}, False),
        (COSTLY, {"kind": "multi-task"}, False),
        (COSTLY, {"actor_weight": 0.0}, False),
    ],
    ids=["costs", "paid, too", "ended early", "attempts", "grid", "choices", "multi-task", "cloning alone"],
)
def test_a_density_in_episodes_that_time_alone_ends_follows_values_alone(
    seen: EnvFacts, agent: dict[str, Any], follows_values_alone: bool
) -> None:
    rows = {row.setting: row.value for row in chosen(seen, Budget(minutes=5), agent=agent)[0].rows}
    found = rows.get("agent.bc_weight"), rows.get("agent.acting_gamma"), rows.get("agent.gammas")
    assert (found == (0.0, 0.99, [])) is follows_values_alone
    assert (rows.get("agent.entropy_weight") == "auto") is follows_values_alone
    assert rows.get("agent.shortcut", False) is follows_values_alone
    unseen = chosen(replace(seen, shows_state=True), Budget(minutes=5), agent=agent)[0].rows
    assert "agent.shortcut" not in {row.setting for row in unseen if seen.num_attempts == 1}


def test_rewards_at_once_need_no_trace_and_no_random_play_that_leads_far() -> None:
    rows = {row.setting for row in chosen(QUIZ, Budget(minutes=5))[0].rows}
    assert not rows & {"agent.trace", "exploration.persistence", "exploration.explorers"}


@pytest.mark.parametrize(
    ("seen", "weight", "falls"),
    [(CARTPOLE, None, True), (CARTPOLE, 0.2, True), (CARTPOLE, 0.0, False), (LAKE, None, False)],
)
def test_the_entropy_bonus_falls_to_nothing_with_a_run_of_single_attempts(
    seen: EnvFacts, weight: float | None, falls: bool
) -> None:
    agent = {} if weight is None else {"entropy_weight": weight}
    choices, _ = chosen(seen, Budget(minutes=5), agent=agent)
    rows = {row.setting: row.value for row in choices.rows}
    assert rows.get("train.entropy_decay_steps") == (rows["train.decay_steps"] if falls else None)


def test_no_trace_decay_is_chosen_without_a_trace() -> None:
    rows = {row.setting for row in chosen(replace(CHEETAH, horizon=50), Budget(minutes=5))[0].rows}
    assert "agent.n_step" in rows
    assert "agent.trace_decay" not in rows


@pytest.mark.parametrize("relabel", [{"relabeler": []}, {"goal": {"rule": "mine:rule"}}])
def test_own_relabelling_gets_no_tolerance(relabel: dict[str, object]) -> None:
    choices, _ = chosen(replace(PENDULUM, goal_reward=REACHED), Budget(minutes=5), train={"relabel": relabel})
    assert not any(row.setting.startswith("train.relabel.goal") for row in choices.rows)


def test_every_row_has_a_reason() -> None:
    for seen, minutes in itertools.product((CARTPOLE, LAKE, PENDULUM), (1, 100)):
        rows = chosen(seen, Budget(minutes=minutes))[0].rows
        assert all(row.reason for row in rows)
        assert len({row.setting for row in rows}) == len(rows)


def test_sizes_grow_with_the_budget() -> None:
    sizes = [settings_of(chosen(CARTPOLE, Budget(minutes=m))[0]).size for m in (1, 15, 16, 240, 241)]
    assert sizes == ["tiny", "tiny", "small", "small", "base"]


def test_an_unknown_limit_is_guessed_from_what_was_seen() -> None:
    assert EnvFacts(name="x", action="Box", observation_size=1, episodes=0, length_max=70).longest == 140
    same = EnvFacts(name="x", action="Box", observation_size=1, episodes=9, length_min=40, length_max=40)
    assert same.longest == 40
    assert math.isclose(same.typical, 40)


def choose_for_data(
    seen: EnvFacts, minutes: float, rate: Rates, steps: int | None = None, **own: object
) -> tuple[Choices, float]:
    choices = Choices({"source": {"name": "own.npz"}, **own}, seen, Budget(minutes=minutes, steps=steps), DATA)
    choices.choose_agent()
    expected = choices.choose_schedule(rate, spent=5.0)
    assert expected is not None
    return choices, expected


@examples(60)
@given(facts, rates, st.floats(0.2, 5_000), st.booleans())
def test_a_plan_for_a_dataset_imports_it_and_never_plays_to_learn(
    seen: EnvFacts, rate: Rates, minutes: float, has_env: bool
) -> None:
    if not has_env:
        rate, seen = replace(rate, collect_seconds=0.0), replace(seen, name="")
    choices, expected = choose_for_data(seen, minutes, rate)
    document = choices.document()
    assert not document.keys() & {"collect", "exploration"}
    settings = settings_of(choices)
    steps = plan(settings)
    done = [step.entry.stage for step in steps]
    assert done[0] == "ingest"
    assert done.count("ingest") == 1
    assert set(done) == {"ingest", "train", *(["evaluate"] if has_env else [])}
    updates = max(step.target for step in steps if step.entry.stage == "train")
    assert settings.train.decay_steps == updates
    assert expected >= updates * rate.update_seconds
    assert settings.agent.actor.distribution != "grid"
    assert settings.train.half_life == 0


@examples(60)
@given(facts, rates, st.floats(0.5, 2_000))
def test_twice_the_time_for_a_dataset_is_never_fewer_updates(seen: EnvFacts, rate: Rates, minutes: float) -> None:
    counts = []
    for each in (minutes, 2 * minutes):
        settings = settings_of(choose_for_data(seen, each, rate)[0])
        counts.append(settings.epochs * settings.train.steps)
    assert counts[1] >= counts[0] * 0.95  # two digits


@pytest.mark.parametrize("minutes", [2, 10, 60])
def test_a_plan_for_a_dataset_fills_its_time(minutes: float) -> None:
    _, expected = choose_for_data(CHEETAH, minutes, Rates(update_seconds=5e-3, collect_seconds=5e-5))
    assert 0.85 * 60 * minutes < expected < 1.05 * 60 * minutes


def test_what_the_user_gives_of_a_plan_for_a_dataset_stands() -> None:
    choices, _ = choose_for_data(CHEETAH, 5, RATES, epochs=3, train={"steps": 70}, agent={"bc_weight": 2.0})
    settings = settings_of(choices)
    assert (settings.epochs, settings.train.steps, settings.agent.bc_weight) == (3, 70, 2.0)
    assert settings.train.decay_steps == 210


def test_cloning_of_a_dataset_has_no_settings_of_critics() -> None:
    choices, _ = choose_for_data(CHEETAH, 5, RATES, agent={"kind": "behaviour-cloning"})
    assert not {"n_step", "target_tau", "bc_weight", "gammas"} & choices.document()["agent"].keys()


@examples(60)
@given(facts, rates, st.floats(0.2, 5_000), st.integers(1, 10**6), st.none() | st.integers(2, 60))
def test_after_half_of_the_updates_on_a_dataset_so_many_steps_are_played(
    seen: EnvFacts, rate: Rates, minutes: float, budget: int, epochs: int | None
) -> None:
    own = {} if epochs is None else {"epochs": epochs}
    settings = settings_of(choose_for_data(seen, minutes, rate, budget, **own)[0])
    played, trained = totals(settings)
    assert budget - settings.epochs <= played <= max(budget, settings.epochs)
    first = next(step for step in plan(settings) if step.entry.stage == "collect")
    before = max(step.target for step in plan(settings) if step.entry.stage == "train" and step.epoch < first.epoch)
    assert before == settings.train.steps * (settings.epochs // 2)
    assert trained == settings.train.steps * settings.epochs
    lakes = [step.settings.train.lakes for step in plan(settings) if step.entry.stage == "train"]
    assert set(lakes) == {("{run}/offline:1",), ("{run}/offline:0.5", "{run}/lake:0.5")}
