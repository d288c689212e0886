"""Single stages as calls, for programs and notebooks: what the commands of `amago` do, without a command line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.config.changes import imports_source, list_acting_keys, refuse_unused
from pipelines.config.load import fold, resolve
from pipelines.config.places import AMAGO, find_bundle, is_run, locate_lake, parse_share
from pipelines.config.policy_files import PolicySource
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import LEARNER, Settings, SourceSettings, TrainSettings
from pipelines.errors import UsageError
from pipelines.events import Listener, silent
from pipelines.lake.lineage import find_lake, read_drawn
from pipelines.lake.storage import is_remote
from pipelines.rollout.environment import find_env_model
from pipelines.stages.make_recipe import choose_by_hand
from pipelines.stages.result import Result
from pipelines.trust import everything

_OF_ONE_CALL = ("policy", "follow", "explore")


def collect(
    env: str | None = None,
    *,
    source: str | None = None,
    run: Path | str | None = None,
    lake: Path | str | None = None,
    steps: int | None = None,
    add: int | None = None,
    policy: str | None = None,
    settings: Mapping[str, Any] | None = None,
    fresh: bool = False,
    listener: Listener = silent,
) -> Result:
    """Collect trajectories into a lake, by running a policy or importing a dataset, as `amago collect` does.

    Args:
        env: environment, as `amago envs` lists it, or "gym:ID", "module:attr".
        source: dataset to import instead of acting, e.g. "parquet:data"; `env` then gives the spaces it must fit.
        run: directory of the run (default: runs/ENV). Repeating the call resumes it.
        lake: lake to write to instead of the run's own: a directory or "s3://bucket/prefix" (gs://, az://).
        steps: total environment steps, over all actors; `add`: this many more, at each call.
        policy: "random", "RUN[@CHECKPOINT]", a bundle or "module:attr".
        settings: further values by dotted key, e.g. {"collect.actors": 8}.
        fresh: start over instead of resuming.
        listener: receives progress and notices (`pipelines.events`).

    A new run measures `env` first, and chooses the settings of all of its stages that are not given.

    Returns:
        A `Result`; metrics: `steps`, `trajectories`, `return_mean` (over finished episodes, in units of reward),
        `steps_per_second`.

    Raises:
        UsageError: a setting is unknown or invalid (all are listed), or the run was configured differently.
        InputMissing: the policy, the dataset or an extra of the environment is missing.
        Locked: another process fills this run.

    >>> collect("tmaze", run="runs/maze", steps=400, settings={"collect.workers": 0}).metrics["steps"]
    400
    """
    if steps is not None and add is not None:
        raise UsageError("steps and add exclude each other", hint="give one of them")
    wanted = steps if add is None else add
    named: dict[str, Any] = {"env.name": env, "source.name": source, "collect.policy": policy}
    if run is None and lake is None:
        name = env if source is None else label_source(source)
        if not name:
            raise UsageError("no environment given", hint="give env or source, or run, a directory to resume")
        run = name_default_run(name)
    stored = without_behaviour(RunDirectory(run).load_document()) if run is not None else {}
    keys = settings or {}
    acting = [name for name, value in {"policy": policy, "add": add}.items() if value is not None]
    imports = imports_source(
        source or keys.get("source.name") or stored.get("source", {}).get("name", ""),
        is_typed=source is not None or any(key.partition(".")[0] == "source" for key in keys),
        acting=acting + list_acting_keys(keys),
    )
    if run is None or RunDirectory(run).exists():
        refuse_unused("collect", keys)
    named["source.steps" if imports else "collect.steps"] = wanted
    resolved = _resolve(stored, named, settings)
    directory = None if run is None else Path(run)
    if fresh and not imports:
        resolved = resolved.model_copy(update={"source": SourceSettings()})
    chosen = None
    if directory is not None:
        chosen = choose_by_hand(
            RunDirectory(directory),
            fold({}, _list_assignments(named, settings)),
            lambda document: _resolve(document, named, settings),
            imports=imports,
            fresh=fresh,
            listener=listener,
        )
    if chosen is not None:
        resolved = chosen.settings
    recipe = None if chosen is None else chosen.recipe
    if imports:
        from pipelines.stages import ingest

        if lake is None and resolved.source.lake:
            lake = locate_lake(resolved.source.lake, directory or Path())
        return ingest.run(resolved, run=directory, lake=lake, listener=listener, fresh=fresh, recipe=recipe)
    from pipelines.stages import collect as engine

    return engine.run(
        resolved, run=directory, lake=lake, listener=listener, fresh=fresh, add=add is not None, recipe=recipe
    )


def train(
    from_lake: Path | str | Sequence[Path | str] = (),
    *,
    run: Path | str | None = None,
    steps: int | None = None,
    add: int | None = None,
    like: str | None = None,
    settings: Mapping[str, Any] | None = None,
    fresh: bool = False,
    listener: Listener = silent,
) -> Result:
    """Train an agent on windows sampled from one or more lakes, as `amago train` does.

    Args:
        from_lake: lake or run, or several of them, each optionally "LAKE:WEIGHT" (default: `train.lakes`).
        run: directory of the run (default: the run of the only lake, otherwise runs/train). Repeating the call
            resumes from its newest checkpoint.
        steps: total gradient updates; `add`: this many more, at each call.
        like: RUN[@CHECKPOINT]: train a new run on exactly the trajectories that this checkpoint was trained on, with
            the settings of that run; `from_lake` then says where its lakes are now, or mixes them by other weights.
        settings: further values by dotted key, e.g. {"size": "tiny", "train.where": "success"}. Unlike the command,
            this chooses no network size for you: without a GPU, give a "size".
        fresh: start over instead of resuming.
        listener: receives progress and notices (`pipelines.events`).

    Returns:
        A `Result`; metrics: `updates`, `loss`, `updates_per_second`, `steps_seen` (valid time steps in all batches).

    Raises:
        UsageError: a setting is unknown or invalid (all are listed), or the run was configured differently.
        InputMissing: a lake does not exist or is empty, or trajectories of `like` have expired.
        Locked: another process trains this run.

    >>> train("runs/maze", steps=2, settings={"size": "tiny"}).metrics["updates"]
    2
    """
    given = [str(from_lake)] if isinstance(from_lake, str | Path) else [str(place) for place in from_lake]
    directory, source = choose_training_run(given, None if run is None else Path(run))
    like = like or (settings or {}).get("train.like")
    if like and "train.where" in (settings or {}):
        raise UsageError("like and train.where exclude each other", hint="its trajectories are chosen already")
    base = load_training_base(directory, source, like)
    base.pop("track", None)  # where to send something is the caller's choice
    if given and "train.lakes" in (settings or {}):
        raise UsageError("from_lake and train.lakes exclude each other", hint="give one of them")
    if RunDirectory(directory).exists():
        refuse_unused("train", settings or {})
    if steps is not None and add is not None:
        raise UsageError("steps and add exclude each other", hint="give one of them")
    resolved = _resolve(base, {"train.steps": steps if add is None else add, "train.like": like}, settings)
    lakes = choose_lakes(given, directory, resolved.train)
    from pipelines.stages import train as engine

    return engine.run(resolved, run=directory, lakes=lakes, listener=listener, fresh=fresh, add=add is not None)


def evaluate(
    run: Path | str,
    *,
    env: str | None = None,
    episodes: int | None = None,
    checkpoint: str | None = None,
    settings: Mapping[str, Any] | None = None,
    trust: bool = False,
    listener: Listener = silent,
) -> Result:
    """Evaluate the policy of a run, of a bundle or of amago:PATH on held-out tasks, as `amago evaluate` does.

    Args:
        run: directory of the run, or of a bundle; or amago:PATH, weights of AMAGO.
        env: environment to play in (default: the run's, or the one that the bundle was trained in).
        episodes: number of complete episodes (default: `evaluate.episodes`).
        checkpoint: "latest", "best" or an update.
        settings: further values by dotted key, e.g. {"evaluate.greedy": True}.
        trust: import modules that a bundle names; a bundle that names any is refused otherwise.
        listener: receives progress and notices (`pipelines.events`).

    Returns:
        A `Result`; metrics: `episodes`, `return_mean`, `return_ci95` (pair), `success_mean` if the task has one,
        `per_task` (dict), `per_attempt` (list). Returns are in units of reward. A repeated evaluation is read from
        the run and has the status "skipped"; that of a bundle is stored nowhere.

    Raises:
        UsageError: a setting is unknown or invalid.
        InputMissing: there is no such run or checkpoint.
        RequirementNotMet: `evaluate.require` is not met; its `result` has the metrics.

    >>> evaluate("runs/maze", episodes=4).metrics["episodes"]
    4
    """
    named = {"env.name": env, "evaluate.episodes": episodes, "evaluate.checkpoint": checkpoint}
    refuse_unused("evaluate", settings or {})
    if str(run).startswith(AMAGO):
        from pipelines.stages.evaluate import run_amago

        return run_amago(_resolve({}, named, settings), name=str(run), listener=listener)
    packed = None if is_run(Path(run)) else find_bundle(run)
    if packed is not None:
        from pipelines.stages import early_checks
        from pipelines.stages.evaluate import run_bundle

        with everything() if trust else contextlib.nullcontext():
            base = early_checks.read_bundle_document(packed, foreign=env is None)
            return run_bundle(_resolve(base, named, settings), directory=packed, listener=listener)
    directory = RunDirectory.open(run)
    from pipelines.stages import evaluate as engine

    document = {key: value for key, value in directory.load_document().items() if key != "track"}
    resolved = _resolve(document, named, settings)
    return engine.run(resolved, run=directory.path, listener=listener)


def shares(lakes: Sequence[str], run: Path) -> list[tuple[Path | str, float, float | None]]:
    """List the lakes that `run` trains on, each with its initial and final weight."""
    if not lakes:
        raise UsageError("no lake given", hint="give --from-lake LAKE, e.g. --from-lake runs/cartpole")
    return [(locate_lake(place, run), weight, last) for place, weight, last in map(parse_share, lakes)]


def choose_lakes(given: Sequence[str], run: Path, train: TrainSettings) -> list[tuple[Path | str, float, float | None]]:
    """List the lakes that `run` trains on, each with its initial and final weight: those given, those that the
    checkpoint of `train.like` was trained on, or `train.lakes`.

    InputMissing if that checkpoint, or a lake of it, is not where it was.
    """
    if given or not train.like:
        return shares(given or train.lakes, run)
    own = RunDirectory(run)
    if own.load_document().get("train", {}).get("like") == train.like and (known := own.load_record().get("lakes")):
        found = [(each["lake"], each["weight"], each["last"]) for each in known]
    else:
        source, _, snapshots = read_drawn(train.like)
        found = [(find_lake(each, source, (), option="--from-lake").name, *each["share"]) for each in snapshots]
    return [(lake, first, None if last == first else last) for lake, first, last in found]


def load_training_base(run: Path, source: Path | None, like: str | None = None) -> dict[str, Any]:
    """Load the settings that a training of `run` changes: its own, or those that a new run adopts of the run at
    `source`, or of that of the checkpoint `like`, whose selection of trajectories comes with it."""
    stored = RunDirectory(run).load_document()
    if not like or PolicySource(like, "train.like").is_stored(stored):
        if stored or source is None:
            return stored
        adopted = RunDirectory(source).load_document()
        adopted.get("train", {}).pop("like", None)  # which is for that run's lakes
        return adopted
    drawn, _, snapshots = read_drawn(like)
    adopted = stored or drawn.load_document()
    kept = {key: value for key, value in adopted.get("train", {}).items() if key not in ("lakes", "follow")}
    return {**adopted, "train": {**kept, "where": snapshots[0]["where"]}}


def choose_training_run(lakes: Sequence[str], run: Path | None) -> tuple[Path, Path | None]:
    """Find the run that trains on `lakes` (`run`, the run of the only lake, or runs/train) and the directory of the
    first lake (None if there is none or if it is in an object store), whose settings a new run adopts."""
    place = parse_share(lakes[0])[0] if lakes else None
    source = None if place is None or is_remote(place) else Path(place)
    if run is None:
        run = source if source is not None and len(lakes) == 1 and is_run(source) else Path("runs") / "train"
    return run, source


def name_default_run(name: str) -> Path:
    """Choose the directory of a run without a name: `gym:ALE/Pong-v5` -> runs/gym-ALE-Pong-v5."""
    return Path("runs") / (re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "run")


def label_source(source: str) -> str:
    """Name a run after a source: `d4rl:data/hopper-v2.hdf5` -> "hopper-v2"."""
    kind, _, place = source.rpartition(":")
    path = Path(place)
    return (path.parent.name if "*" in path.name else path.stem) or kind


def without_behaviour(document: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the last policy from a run's configuration: each call gives its own. A learner goes on."""
    collect = document.get("collect", {})
    table = {key: value for key, value in collect.items() if key not in _OF_ONE_CALL}
    if str(collect.get("policy", "")).startswith(LEARNER):
        table["policy"] = collect["policy"]
    return {**document, "collect": table}


def _resolve(base: Mapping[str, Any], named: Mapping[str, Any], settings: Mapping[str, Any] | None) -> Settings:
    """Apply named arguments (None: not given) and `settings` to a run's configuration."""
    return resolve({}, _list_assignments(named, settings), env_model=find_env_model, stored=base, source="call")


def _list_assignments(
    named: Mapping[str, Any], settings: Mapping[str, Any] | None
) -> list[tuple[tuple[str, ...], Any]]:
    given = {key: value for key, value in named.items() if value is not None} | dict(settings or {})
    return [(tuple(key.split(".")), value) for key, value in given.items()]
