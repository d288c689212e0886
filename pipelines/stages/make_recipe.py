"""A recipe for an environment that has none: measure it, choose settings from the budget, and say why."""

from __future__ import annotations

import contextlib
import functools
import numbers
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipelines.config.changes import flatten, may_change
from pipelines.config.host import is_main
from pipelines.config.load import fold
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import CollectSettings, EnvSettings, Settings
from pipelines.errors import IntegrityError, UsageError
from pipelines.events import Listener, Notice, silent
from pipelines.stages.choices import (
    LONG_EPISODE,
    Budget,
    Choice,
    Choices,
    EnvFacts,
    Rates,
    round_digits,
)

if TYPE_CHECKING:
    from pipelines.stages.measure import Recorded

DEFAULT_MINUTES = 5.0
_START_SECONDS = 1.0  # of reading the disk when the command starts
_RANDOM_SHARE, _LEAST_RANDOM, _MOST_RANDOM = 0.1, 1.0, 15.0  # seconds of random play, until episodes end
_RANDOM_SECONDS, _RATE_SECONDS = 0.5, 1.0  # of random play at least, and of updates and of acting
_ROW = {"setting", "value", "reason"}
# Settings of `collect` that imports, measuring and evaluations heed, too.
_USED_IDLE = tuple(
    f"collect.{key}" for key in ("actors", "workers", "env_timeout_seconds", "on_env_error", "seal_seconds")
)
_DATA_SHARE, _LEAST_DATA, _MOST_DATA = 0.05, 1.0, 30.0  # seconds of reading a dataset
_LIMIT = "max_episode_steps"
_REPEAT = "action_repeat"  # a parameter of environments that are stepped one after another
_WHOLE_MINUTES, _WHOLE_STEPS = 1.0, 20_000  # a smaller budget is measured for less time

# Resolves a document below the settings that the user gives.
Resolve = Callable[[Mapping[str, Any]], Settings]


@dataclass(frozen=True, kw_only=True)
class MadeRecipe:
    """Chosen settings as a `document`, the rows of the table, and, as plain data, the `plan` for the run's record."""

    document: dict[str, Any]
    choices: tuple[Choice, ...]
    plan: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, choices: Choices, *, rates: Rates | None = None, expected: float | None = None) -> MadeRecipe:
        """Make the recipe that was chosen; `rates` were measured, and it takes about `expected` seconds."""
        plan = {
            "budget": {key: value for key, value in asdict(choices.budget).items() if value is not None},
            "measured": choices.facts.document() | ({} if rates is None else asdict(rates)),
            **({} if choices.data is None else {"data": asdict(choices.data)}),
            "expected_seconds": expected and round(expected),
            "choices": [asdict(row) for row in choices.rows],
        }
        return cls(document=choices.document(), choices=tuple(choices.rows), plan=plan)

    def begin(
        self, given: Mapping[str, Any], settings: Settings, recipe: tuple[str, Mapping[str, Any]] = ("", {})
    ) -> Begun:
        """Make a new run of it, with these settings, of which `recipe` or the user gave `given`."""
        entry = self.record(given, recipe)
        return Begun(settings=settings, recipe=entry, document=self.document, is_new=True)

    def record(self, given: Mapping[str, Any], recipe: tuple[str, Mapping[str, Any]] = ("", {})) -> dict[str, Any]:
        """Make the entry of run.json about the recipe: its name, if it has one, the plan, and what the user gave in
        place of the recipe's values or of a choice."""
        name, document = recipe
        own, profile = flatten(given), str(given.get("profile", ""))
        there = flatten(fold(document, [(("profile",), profile)] if profile else []))
        changed = {
            key: [there.get(key), value]
            for key, value in own.items()
            if there.get(key) != value
            and key not in ("seed", "minutes", "steps", "profile")
            and not key.startswith("env.")
        }
        return {"name": name, "profile": profile, "changed": changed, "given": own, "plan": self.plan}


def make_budget(minutes: float | None, steps: int | None, *, has_data: bool = False) -> Budget:
    """Make the budget that the options give. UsageError if both do, except of a run that learns from a dataset, or if
    it is not positive."""
    if minutes is not None and steps is not None and not has_data:
        raise UsageError("--minutes and --steps exclude each other", hint="give one of them")
    if steps is not None:
        if not isinstance(steps, numbers.Integral) or isinstance(steps, bool) or steps < 1:
            raise UsageError(f"--steps {steps} is not a budget", hint="give a whole number, at least 1")
        steps = int(steps)
        if not has_data:
            return Budget(steps=steps)
    minutes = DEFAULT_MINUTES if minutes is None else minutes
    if not isinstance(minutes, numbers.Real) or isinstance(minutes, bool) or not 0 < minutes < float("inf"):
        shown = f"{minutes:g}" if isinstance(minutes, float) else minutes
        raise UsageError(f"--minutes {shown} is not a budget", hint="give a number above 0, e.g. --minutes 5")
    return Budget(minutes=float(minutes), steps=steps)


def find_budget(settings: Settings, *, minutes: float | None, steps: int | None) -> Budget:
    """Find the budget of a run without stages: what the call gives, as `minutes` and `steps`, or else its recipe."""
    has_data = bool(settings.source.name)
    if has_data or (minutes is None and steps is None):
        minutes = settings.minutes if minutes is None else minutes
        steps = settings.steps if steps is None else steps
    return make_budget(minutes, steps, has_data=has_data)


def make_recipe(
    resolve: Resolve, given: Mapping[str, Any], budget: Budget, *, listener: Listener = silent
) -> MadeRecipe:
    """Measure the environment and the dataset that the user's settings name, and choose the others for the budget.

    `resolve` lays the user's settings, `given`, over a document. Errors are those of the
    settings, of the environment and of the dataset.
    """
    began, settings = time.monotonic(), resolve({})
    if given.get("relabel"):
        raise UsageError(
            "a recipe without stages has no use for relabel",
            hint="list its stages, such as stages = ['collect', 'relabel', 'train', 'evaluate']",
        )
    has_data = bool(settings.source.name)
    if has_data and budget.steps is not None and not settings.env.name:
        raise UsageError(
            "--steps: no environment is named to take them in", hint="give --env ENV, or leave --steps out"
        )
    if has_data and budget.steps is not None and settings.epochs == 1 and "epochs" in given:
        raise UsageError("epochs = 1: it plays in the second half of them", hint="give 2 or more, or leave --steps out")
    plays = not has_data or budget.steps is not None
    idle = [key for key in flatten(given) if key.startswith(("exploration.", "collect.")) and key not in _USED_IDLE]
    if idle and not plays:
        raise UsageError(
            f"{', '.join(idle)}: a run that learns from a dataset alone collects nothing",
            hint="give --steps N to collect N steps after it, or leave this out",
        )
    if has_data and not _can_measure(settings, listener):
        raise UsageError(
            f"'{settings.source.name}' can be read once, and is read to be measured and to be imported",
            hint="name a function that returns its trajectories",
        )
    if settings.agent.target == "label" and not has_data:
        from pipelines.stages.run import require_labels  # imports torch

        require_labels(settings)  # before what takes minutes
    if plays and (tasks := settings.collect.tasks):  # their holders determine the number of actors
        from pipelines.rollout.environment import read_tasks

        count = tasks if isinstance(tasks, int) else len(read_tasks(tasks))
        given = {**given, "collect": {**given.get("collect", {}), "actors": count * settings.collect.copies}}
    choices, recorded = _measure(settings, given, budget, listener)
    choices.choose_agent()
    rates: Rates | None = None
    if budget.minutes is not None:
        from pipelines.stages import measure  # imports torch

        effort = min(budget.minutes / _WHOLE_MINUTES, 1.0)
        resolved, seconds = resolve(choices.document()), _RATE_SECONDS * effort
        rates = measure.measure_rates(resolved, recorded=recorded, seconds=seconds, listener=listener)
    in_cpu_seconds = rates is not None and rates.in_cpu_seconds
    spent = _START_SECONDS + (time.process_time() if in_cpu_seconds else time.monotonic() - began)
    expected = choices.choose_schedule(rates, spent=spent)
    if expected is not None and budget.minutes is not None and expected > 60 * budget.minutes * 1.2:
        text = f"measuring and the shortest run take about {expected:.0f} s, more than --minutes {budget.minutes:g}"
        listener(Notice(stage="measure", text=text, level="warning"))
    return MadeRecipe.of(choices, rates=rates, expected=expected)


def choose_by_hand(
    directory: RunDirectory,
    given: Mapping[str, Any],
    resolve: Resolve,
    *,
    imports: bool = False,
    fresh: bool = False,
    listener: Listener = silent,
) -> Begun | None:
    """Choose the settings of a run that begins with a random `collect`, for that many environment steps, or with one
    that `imports` a dataset, so that the stages after it find them in the run. None if nothing is to be chosen: the run
    has begun, its steps are for the agent of another run, or its settings are those of a recipe.

    `given` and `resolve` as for `make_recipe`. With `fresh`, settings are kept as long as the environment is the same.
    """
    settings = resolve({})
    if imports:
        if "stages" in given or directory.exists() or not _can_measure(settings, listener):
            return None
        choices, recorded = _measure(settings, given, Budget(minutes=DEFAULT_MINUTES), listener)
        assert recorded is not None
        choices.budget = Budget(steps=recorded.data.total_steps)
        choices.choose_agent()
        choices.choose_amounts()
        made = MadeRecipe.of(choices)
        return made.begin(given, resolve(made.document))
    if "stages" in given or settings.collect.follow or settings.collect.policy not in ("auto", "random"):
        return None
    if directory.exists():
        env, stored = settings.document()["env"], directory.load_document().get("env")
        chosen = {_REPEAT: stored[_REPEAT]} if isinstance(stored, dict) and _REPEAT in stored else {}
        is_other = stored != {**chosen, **env}
        if not (fresh and is_other) or directory.load_record().get("stages", {}).keys() - {"collect"}:
            return None
    from pipelines.rollout.environment import require_limit
    from pipelines.stages.collect import explain_size  # imports torch

    require_limit(settings.collect)
    steps, actors = _size_collect(settings.collect, settings.env, listener)
    facts, played = _measure_env(settings, Budget(steps=steps), listener)
    if played != settings.env:  # its episodes have fewer steps
        steps, actors = _size_collect(settings.collect, played, listener)
    if "auto" in (settings.collect.steps, settings.collect.actors):
        explain_size(steps, actors * settings.collect.collectors, facts.horizon, listener)
    choices = Choices(given, facts, Budget(steps=steps * facts.action_repeat))
    choose_limit(choices, settings)
    choices.choose("collect.steps", steps, "each actor ends two episodes")
    choices.choose("collect.actors", actors, "as many as are quick and end two episodes")
    choices.choose_agent()
    choices.choose_amounts()
    _report_random_play(choices.facts, listener)
    made = MadeRecipe.of(choices)
    return made.begin(given, resolve(made.document))


def _measure(
    settings: Settings, given: Mapping[str, Any], budget: Budget, listener: Listener
) -> tuple[Choices, Recorded | None]:
    """Measure the environment and the dataset that the settings name, and report both; begin the table of choices."""
    facts = _measure_env(settings, budget, listener)[0] if settings.env.name else None
    recorded = None
    if settings.source.name:
        recorded = _measure_data(settings, facts, budget, listener)
        facts = recorded.facts
    assert facts is not None
    choices = Choices(given, facts, budget, None if recorded is None else recorded.data)
    if settings.env.name:
        choose_limit(choices, settings)
        _report_random_play(choices.facts, listener)
    if recorded is not None:
        data = recorded.data
        what = (
            f"{data.trajectories:,} trajectories of {data.steps:,} steps{'' if data.is_whole else ', its first ones'}"
        )
        text = f"dataset: return {data.return_mean:.4g}, of the best tenth {data.return_high:.4g} ({what})"
        listener(Notice(stage="measure", text=text))
    return choices, recorded


def _size_collect(collect: CollectSettings, env: EnvSettings, listener: Listener) -> tuple[int, int]:
    """Determine the steps and the actors of `collect` where they are "auto"."""
    from pipelines.rollout.environment import with_actors  # imports torch

    sized = with_actors(collect, env, listener=listener)
    assert isinstance(sized.steps, int)
    assert isinstance(sized.actors, int)
    return sized.steps, sized.actors


def _measure_env(settings: Settings, budget: Budget, listener: Listener) -> tuple[EnvFacts, EnvSettings]:
    """Play at random for as long as the budget allows; where single steps are too fine, again by repeated actions.
    Return the environment that is to be played, too."""
    from pipelines.envs.make import find_settings_model
    from pipelines.stages import measure  # imports torch

    what = "" if budget.minutes is None else ", then the cost of acting and of an update"
    listener(Notice(stage="measure", text=f"random play in {settings.env.name}{what}"))
    if budget.minutes is None:
        effort = min((budget.steps or 0) / _WHOLE_STEPS, 1.0)
        seconds = max(_MOST_RANDOM * effort, _LEAST_RANDOM)
    else:
        effort = min(budget.minutes / _WHOLE_MINUTES, 1.0)
        seconds = min(max(_RANDOM_SHARE * 60 * budget.minutes, _LEAST_RANDOM), _MOST_RANDOM)
    env = settings.env
    play = functools.partial(
        measure.measure_env,
        collect=settings.collect,
        seconds=seconds,
        least=_RANDOM_SECONDS * effort,
        device=settings.train.device,
        action_mask=settings.agent.action_mask,
        seed=settings.seed,
        listener=listener,
    )
    facts = play(env)
    can_repeat = facts.one_by_one and _REPEAT in find_settings_model(env.name).model_fields
    can_repeat &= not settings.source.name  # whose steps were recorded one by one
    if not can_repeat or _REPEAT in env.params or facts.best_repeat == 1:
        return facts, env
    env = EnvSettings.model_validate({"name": env.name, **env.params, _REPEAT: facts.best_repeat})
    return replace(play(env), step_change=facts.step_change, inertia=facts.inertia), env


def _can_measure(settings: Settings, listener: Listener) -> bool:
    """Check whether the dataset can be read more than once. UsageError if it lacks labels that are to be learned."""
    from pipelines.stages.ingest import open_source

    with contextlib.closing(open_source(settings, listener)) as source:
        if settings.agent.target == "label" and not source.labelled:
            raise UsageError(
                f"agent.target is 'label', but '{settings.source.name}' has no labels", hint="leave out agent.target"
            )
        return bool(getattr(source, "repeats", True))


def _measure_data(settings: Settings, env: EnvFacts | None, budget: Budget, listener: Listener) -> Recorded:
    """Read the dataset, or its beginning, for a share of the budget."""
    from pipelines.stages import measure  # imports torch
    from pipelines.stages.ingest import open_source

    assert budget.minutes is not None
    listener(Notice(stage="measure", text=f"what was recorded in {settings.source.name}"))
    seconds = min(max(_DATA_SHARE * 60 * budget.minutes, _LEAST_DATA), _MOST_DATA)
    with contextlib.closing(open_source(settings, listener)) as source:
        return measure.measure_data(
            source,
            env,
            steps=settings.source.steps,
            seconds=seconds,
            device=settings.train.device,
            listener=listener,
        )


def choose_limit(choices: Choices, settings: Settings) -> None:
    """End episodes that may have no end: an evaluation, which plays them to their ends, would have none either.

    A policy may walk in circles where random play leaves them: after 54 updates no episode of CliffWalking ended within
    twelve minutes, and those of random play had 5,600 steps.
    """
    from pipelines.envs.make import find_settings_model

    facts, model = choices.facts, find_settings_model(settings.env.name)
    if facts.is_fixed or facts.horizon is not None or _LIMIT not in model.model_fields:
        return
    limit = LONG_EPISODE
    reason = f"no episode of random play ended in {facts.length_max:,} steps, and no limit is known"
    if facts.episodes:
        limit = max(LONG_EPISODE, int(round_digits(2 * facts.length_mean)))
        reason = f"no limit is known, and a policy may walk in circles; random play took {facts.length_mean:,.4g} steps"
    limit = choices.choose(f"env.{_LIMIT}", limit, reason)
    if not facts.episodes or facts.length_max > LONG_EPISODE:
        choices.facts = replace(facts, horizon=limit)


def _report_random_play(facts: EnvFacts, listener: Listener) -> None:
    """Send notices of the score of random play, the length of episodes, and whether they end at all."""
    text = f"no episode of random play ended in {facts.length_max:,} steps: its score is unknown"
    if facts.return_mean is not None:
        success = "" if facts.success_mean is None else f", success {facts.success_mean:.2g}"
        each = f"{facts.episodes} episodes of {facts.length_mean:,.4g} steps"
        text = f"random play: return {facts.return_mean:.4g}{success} ({each})"
    listener(Notice(stage="measure", text=text))
    if not facts.episodes and facts.horizon is None:
        text = "no limit of an episode is known, and an evaluation plays episodes to their ends"
        text += "; if they may not end, give --set env.max_episode_steps=N"
        listener(Notice(stage="measure", text=text, level="warning"))


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A run without a recipe: its settings, what its record says in place of a recipe's name (`MadeRecipe.record`),
    and the `document` of chosen settings, or of all that are stored. `is_new`: they were chosen by this call."""

    settings: Settings
    recipe: Mapping[str, Any]
    document: Mapping[str, Any] = field(repr=False)
    is_new: bool


def begin(
    directory: RunDirectory,
    budget: Budget,
    given: Mapping[str, Any],
    resolve: Resolve,
    *,
    recipe: tuple[str, Mapping[str, Any]] = ("", {}),
    fresh: bool = False,
    listener: Listener = silent,
) -> Begun:
    """Find the settings that the run at `directory` has begun with; for a new run, or with `fresh`, choose them.

    `given` and `resolve` as for `make_recipe`; `recipe`, name and document, is what the user named. UsageError if the
    run has begun with other settings.
    """
    stored = None if fresh else read_recipe(directory, budget, given)
    if stored is not None:
        document = directory.load_document()
        settings = resolve(document)
        directory.refuse_changes("run", settings)
        return Begun(settings=settings, recipe=stored, document=document, is_new=False)
    if not is_main():  # ranks take part in what the first of them has chosen
        return Begun(settings=resolve({}), recipe={}, document={}, is_new=False)
    made = make_recipe(resolve, given, budget, listener=listener)
    return made.begin(given, resolve(made.document), recipe)


def read_budget(plan: Mapping[str, Any]) -> Budget:
    """Read the budget of a stored plan. IntegrityError if the plan is damaged."""
    budget = plan.get("budget")
    minutes, steps = (budget.get("minutes"), budget.get("steps")) if isinstance(budget, dict) else (None, None)
    rows = plan.get("choices")
    is_whole = isinstance(rows, list) and all(isinstance(row, dict) and row.keys() >= _ROW for row in rows)
    if is_whole and (minutes is not None or steps is not None):
        with contextlib.suppress(UsageError):
            return make_budget(minutes, steps, has_data="data" in plan and minutes is not None)
    raise IntegrityError("the plan in run.json is damaged", hint="start over with --fresh, or choose another --run")


def read_recipe(directory: RunDirectory, budget: Budget, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read what `MadeRecipe.record` has recorded in a run that has begun; None if the run has not.

    UsageError if it follows a recipe, was made for another budget, or with settings that are not `given` again. A
    setting that is added, or given another value, is a change as in any run.
    """
    record = directory.load_record()
    if "run" not in record.get("stages", {}):
        return None
    recipe = record.get("recipe")
    plan = recipe.get("plan") if isinstance(recipe, dict) else None
    if not isinstance(recipe, dict) or not isinstance(plan, dict):
        name = recipe.get("name") if isinstance(recipe, dict) else None
        raise UsageError(
            f"'{directory.path}' was run by recipe '{name or 'unknown'}'",
            hint="name the recipe to go on, start over with --fresh, or choose another --run",
        )
    stored, now, before = read_budget(plan), flatten(given), recipe.get("given")
    problems = [] if stored == budget else [f"{stored.text} -> {budget.text}"]
    for key, value in before.items() if isinstance(before, dict) else ():
        if key not in now and not may_change(key):
            problems.append(f"{key}: {value!r} -> (not given)")
    if problems:
        raise UsageError(
            f"the plan of '{directory.path}' was made for another command",
            hint="repeat it unchanged, start over with --fresh, or choose another --run",
            problems=tuple(problems),
        )
    return recipe
