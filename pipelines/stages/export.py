"""export: write a policy in forms that act without the run or this package, or trajectories for other tools."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipelines.config.places import refuse_scheme
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import ExportSettings, Settings
from pipelines.envs.env import Env
from pipelines.errors import InputMissing, IntegrityError
from pipelines.evaluation.adaptation import compute_metrics
from pipelines.evaluation.runner import evaluate
from pipelines.events import Listener, Notice, silent
from pipelines.export import forms, parity
from pipelines.export.policy_bundle import describe_policy, find_former_files, write_bundle
from pipelines.export.step_function import StepFunction
from pipelines.files.atomic import write_together
from pipelines.files.hub import HubAddress, is_on_hub
from pipelines.formats import export as datasets
from pipelines.formats.make import find_exporter
from pipelines.lake.footer import hex_uids
from pipelines.lake.reading import Reader
from pipelines.lake.store import Lake
from pipelines.learning import bundle
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.checkpoint import Checkpoint, load_agent
from pipelines.report import model_card, onnxruntime_web, policy_page
from pipelines.rollout.environment import make_evaluation_env, workers
from pipelines.rollout.policies import Policy, trained
from pipelines.runs.evaluations import Evaluation, name_mode, to_number
from pipelines.runs.stored import StoredRun, read_run
from pipelines.stages.early_checks import choose_folder, locate_bundle
from pipelines.stages.result import Result, Table


def run(settings: Settings, *, run: Path, listener: Listener = silent) -> Result:
    """Export to `export.to` in the formats `export.format`: the policy of a checkpoint (default: RUN/export, replacing
    an older one; hf://ORG/NAME: uploaded), or the trajectories of the run's lake, see `dataset`.

    IntegrityError if a form does not act as the trained policy does; then nothing is written.
    """
    wanted, started = settings.export, time.monotonic()
    if not wanted.of_policy:
        return dataset(wanted, lake=run, listener=listener)
    directory = RunDirectory.open(run)
    place = wanted.to or directory.path / "export"
    with _open_target(place) as to:
        checkpoint = checkpoints.load(directory.checkpoints, wanted.checkpoint)
        figures, tables = _export_policy(settings, checkpoint, to, listener, run=read_run(run))
    return Result(
        command="export",
        run=run,
        metrics=figures,
        outputs=[place],
        tables=tables,
        seconds=time.monotonic() - started,
    )


def of_bundle(settings: Settings, *, directory: Path, listener: Listener = silent) -> Result:
    """Export the policy of the bundle in `directory` to another directory, `export.to`, with the forms
    `export.format`. Errors as of `run`."""
    place, started = locate_bundle(settings.export, directory), time.monotonic()
    with _open_target(place) as to:
        figures, tables = _export_policy(settings, bundle.read(directory), to, listener)
    return Result(command="export", metrics=figures, outputs=[place], tables=tables, seconds=time.monotonic() - started)


@contextmanager
def _open_target(place: Path | str) -> Iterator[Path]:
    """Yield the directory to write a bundle to. That of a place on the Hub is a temporary one, and what is in it at the
    end is uploaded in one commit."""
    if not is_on_hub(place):
        refuse_scheme(place, what="give a directory, or hf://ORG/NAME")
        yield Path(place)
        return
    address = HubAddress.parse(str(place), kind="models")
    address.import_library()  # before what takes minutes
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / address.repository.partition("/")[2]
        yield to
        address.upload(to)


def _export_policy(
    settings: Settings, checkpoint: Checkpoint, to: Path, listener: Listener, *, run: StoredRun | None = None
) -> tuple[dict[str, Any], list[Table]]:
    """Write the bundle of a checkpoint, of a run or of another bundle; return its figures and tables."""
    wanted, asked = settings.export, settings.evaluate
    find_former_files(to)  # before what takes minutes
    greedy = asked.acts_greedily(by_default=checkpoint.greedy)
    split = asked.task_split
    settings = settings.model_copy(update={"evaluate": asked.model_copy(update={"greedy": greedy, "split": split})})
    with_page = "page" in wanted.format
    named = {*wanted.format, forms.ONNX} if with_page else set(wanted.format)
    chosen = tuple(form for form in forms.FILES if form in named)
    forms.require_packages(chosen, asked="page" if with_page else forms.ONNX)
    if with_page:  # before what takes minutes
        lakes = policy_page.make_environment(checkpoint.record)
        runtime = onnxruntime_web.read_files(wanted.onnxruntime_web, listener)
    files: Mapping[str, bytes] = {}
    about: Mapping[str, Any] = {}
    figures: dict[str, Any] = {}
    tables: list[Table] = []
    report: Mapping[str, Any] = {}
    if chosen:
        with _use_threads(settings.train.threads or 1):
            proof = _Proof(settings=settings, checkpoint=checkpoint, greedy=greedy, listener=listener)
            files, about, report = proof.make(chosen)
        figures, tables = {"parity": report["forms"]}, [table(report)]
    evaluation = choose_evaluation(checkpoint, report, run=run, split=split, greedy=greedy)
    if with_page:
        page = policy_page.write_page(lakes, about, files, evaluation.metrics if evaluation else None, runtime)
        files = {**files, policy_page.PAGE: page}
    with checkpoint.understood():
        size = write_bundle(checkpoint.acting, checkpoint.record, to, greedy=greedy, forms=files, about=about)
    if wanted.card:
        _write_card(checkpoint, to, [*files], run, evaluation, greedy=greedy, licence=wanted.licence)
    return {"update": checkpoint.update, "acts": name_mode(greedy), "bytes": size, **figures}, tables


def choose_evaluation(
    checkpoint: Checkpoint, report: Mapping[str, Any], *, run: StoredRun | None, split: str, greedy: bool
) -> Evaluation | None:
    """Choose the evaluation whose scores the card and the page show: the newest one of the run at this checkpoint, if
    the policy acted in it as the bundle does. Otherwise, of the evaluation of the proof and that of the bundle it is
    made from, the one with more episodes."""
    if run is not None and (found := model_card.find_evaluation(run, checkpoint.update, greedy=greedy)) is not None:
        return found
    proofs = [report.get("evaluations", {}).get("original")]
    if isinstance(checkpoint, bundle.Bundle) and checkpoint.greedy == greedy:
        proofs.append(parity.read_scores(checkpoint))
    known = [proof for proof in proofs if proof]
    if not known:
        return None
    longest = max(known, key=lambda figures: to_number(figures.get("episodes")) or 0.0)
    return model_card.make_evaluation(longest, update=checkpoint.update, split=split, greedy=greedy)


@contextmanager
def _use_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads. The steps of a proof are of a few actors: shared between threads, which wait for
    each other at every operator, they cost three times the CPU time, and more on a busy host.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_card(
    checkpoint: Checkpoint,
    to: Path,
    files: Sequence[str],
    run: StoredRun | None,
    evaluation: Evaluation | None,
    *,
    greedy: bool,
    licence: str,
) -> None:
    """Write the model card, which is not sealed: users edit it."""
    record = checkpoint.record
    about: dict[str, Any] = {"name": to.resolve().name, "version": ""} if run is None else model_card.read_fields(run)
    source = model_card.CardSource(
        **about,
        env=record["env"],
        update=checkpoint.update,
        files=files,
        evaluation=evaluation,
        greedy=greedy,
        lakes=model_card.list_lakes(record),
        steps=record.get("steps_seen"),
        licence=licence,
    )
    beside = model_card.read_media(run) if run is not None else {}
    write_together(to, {**beside, model_card.NAME: source.write(pictures=[*beside])})


@dataclass(frozen=True, kw_only=True)
class _Proof:
    """The proof that forms act as the policy of a checkpoint does: on recorded steps, and by their scores."""

    settings: Settings
    checkpoint: Checkpoint
    greedy: bool
    listener: Listener

    def make(self, chosen: tuple[str, ...]) -> tuple[dict[str, bytes], dict[str, Any], dict[str, Any]]:
        """Make the files of the forms, their entries in policy.json, and the report of the proof."""
        settings, checkpoint, greedy, listener = self.settings, self.checkpoint, self.greedy, self.listener
        agent = load_agent(checkpoint, own=settings.agent)
        capacity = checkpoint.record["context_length"]
        function = StepFunction(agent, capacity=capacity)
        listener(Notice(stage="export", text=f"exporting the step function: {', '.join(chosen)}"))
        files = forms.make_files(function, chosen, weights=settings.export.weights)
        record = {
            **describe_policy(checkpoint.record, greedy=greedy),
            **forms.describe_step(function),
            "forms": list(chosen),
        }
        record["weights"] = settings.export.weights
        if forms.AOTI in chosen:
            record["compiled"] = forms.describe_target()
        listener(Notice(stage="export", text=f"recording steps of {parity.ACTORS} actors"))
        env = self._make_env(actors=parity.ACTORS)
        try:
            policy = AgentPolicy(agent, num_actors=parity.ACTORS, capacity=capacity, seed=settings.evaluate.seed)
            recording = parity.record(policy, env, greedy=greedy, seed=settings.evaluate.seed, listener=listener)
        finally:
            env.close()
        agreements = {}
        for form in chosen:
            listener(Notice(stage="export", text=f"comparing {form} on the recorded steps"))
            step = forms.open_form(form, files[forms.FILES[form]], record, parity.ACTORS)
            agreements[form] = parity.compare(recording, step, forms.choose_limits(form, record), listener=listener)
        parity.require(agreements)
        proof, report = parity.encode_files(recording, agreements, self._evaluate(files, record))
        files |= proof
        record["parity"] = vars(forms.choose_limits(forms.ONNX, record))
        return files, record, report

    def _make_env(self, *, actors: int) -> Env:
        env, collect = self.settings.env, self.settings.collect
        return make_evaluation_env(
            env,
            self.settings.evaluate,
            actors=actors,
            workers=workers(env, collect, actors=actors),
            timeout_seconds=collect.env_timeout_seconds,
        )

    def _evaluate(self, files: Mapping[str, bytes], record: Mapping[str, Any]) -> dict[str, Any]:
        """Score the policy and its forms on the same episodes. IntegrityError if the mean return of a
        form is outside the policy's interval."""
        settings, greedy, listener = self.settings, self.greedy, self.listener
        episodes, wanted = settings.export.episodes, settings.evaluate
        if not episodes:
            return {}
        actors = min(wanted.actors, episodes)
        found: dict[str, Any] = {}
        for form in ("original", *record["forms"]):
            listener(Notice(stage="export", text=f"evaluating {form}: {episodes} episodes"))
            env = self._make_env(actors=actors)
            try:
                if form == "original":
                    policy: Policy = trained(
                        self.checkpoint, env, policy_id="", seed=wanted.seed, greedy=greedy, own=settings.agent
                    ).policy
                else:
                    step = forms.open_form(form, files[forms.FILES[form]], record, actors)
                    policy = forms.ExportedPolicy(step, record, greedy=greedy, seed=wanted.seed)
                figures = compute_metrics(evaluate(env, policy, episodes=episodes, listener=listener))
            finally:
                env.close()
            found[form] = {key: value for key, value in figures.items() if key not in ("per_task", "published")}
            mean, (low, high) = found[form]["return_mean"], found["original"]["return_ci95"]
            slack = 1e-6 * max(abs(low), abs(high), 1e-6)
            if not low - slack <= mean <= high + slack:
                raise IntegrityError(
                    f"the form '{form}' scores {mean:.4g}, outside the policy's interval [{low:.4g}, {high:.4g}]",
                    hint="please report it with the agent's settings",
                )
        return found


def table(report: Mapping[str, Any]) -> Table:
    """Tabulate the proof for people."""
    rows = []
    for form, agreement in report["forms"].items():
        figures = report["evaluations"].get(form)
        score = [f"{figures['return_mean']:.4g}"] if figures else ["-"]
        shares = (f"{agreement[name]:.2%}" for name in ("equal_greedy", "equal_sampled"))
        rows.append([form, f"{agreement['greatest_difference']:.1e}", *shares, *score])
    original = report["evaluations"].get("original")
    if original:
        low, high = original["return_ci95"]
        rows.insert(0, ["original", "", "", "", f"{original['return_mean']:.4g} [{low:.4g}, {high:.4g}]"])
    steps = next(iter(report["forms"].values()))
    title = f"{steps['steps']} steps of {steps['actors']} actors, {steps['resets']} resets"
    return Table(title=title, columns=["form", "difference", "greedy equal", "sampled equal", "return"], rows=rows)


def dataset(wanted: ExportSettings, *, lake: Path | str, listener: Listener = silent) -> Result:
    """Export the trajectories of a lake that match `export.where`; `export.to` defaults to the folder `dataset` in the
    lake's run. InputMissing if there are none."""
    started = time.monotonic()
    refuse_scheme(wanted.to, what="give a directory")
    form = wanted.format[0]
    find_exporter(form)
    store = Lake(lake)
    store.salvage(listener=listener)
    to = Path(wanted.to) if wanted.to else choose_folder(store)
    uids = Reader(store, listener=listener).uids()
    if wanted.where.strip():
        from pipelines.lake.sql.selection import select

        chosen = set(hex_uids(select(store, wanted.where, listener=listener).uids))
        uids = [uid for uid in uids if uid in chosen]
    if not uids:
        what = "no trajectory that matches" if wanted.where.strip() else "no trajectories"
        raise InputMissing(f"lake '{store.name}' has {what}")
    said = {"author": wanted.author, "description": wanted.description}
    about = {"lake": store.id, "where": wanted.where, **{name: text for name, text in said.items() if text}}
    done = datasets.export(store, uids, to, form=form, about=about, listener=listener)
    return Result(
        command="export",
        status="done" if done.written else "skipped",
        lake=store.name,
        metrics={
            "trajectories": done.trajectories,
            "steps": done.steps,
            "written": done.written,
            "bytes": done.bytes,
        },
        outputs=[to],
        seconds=time.monotonic() - started,
    )
