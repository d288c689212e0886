"""No file that is read can cause a traceback, a hang or memory without bound, whatever is in it."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest

from pipelines.errors import AmagoError
from pipelines.export.policy_bundle import load_policy
from tests.cli.conftest import call, tiny
from tests.formats.test_learning_histories import vintix, xland
from tests.formats.test_lerobot import dataset
from tests.fuzz import datasets, mutations, odd
from tests.fuzz.odd import Mutation
from tests.tiers import trials

MUTATIONS = 5_000
SECONDS = 60.0  # CPU time of one command: far more than any takes
GROWTH_KIB = 1 << 20
Command = Sequence[object]
TRAIN = ("train", "--from-lake", "small", "--encoder", "feedforward", *tiny(), "-q", "--steps")
CARTPOLE = ("--env", "gym:CartPole-v1", "--actors", 2)
INFO = ("lake", "info", "small")
LINEAGE = ("lake", "lineage", "small")
SAMPLE = ("lake", "sample", "small", "--limit", 1)
VERIFY = ("lake", "verify", "small")
EVALUATE = ("evaluate", "small", "--episodes", 2, "-q")
EVALUATE_BUNDLE = ("evaluate", "small/export", "--episodes", 1)
EXPORT = ("export", "small", "-q")
METRICS = ("lake", "sql", "small", "select * from metrics")
ACT = ("act",)


def taken(name: str, *more: str) -> Command:
    return ("collect", "--from", name, *more, "--lake", "new", "-q")


TABLE = taken(
    "parquet:lerobot/data/*/*.parquet",
    "--set",
    'source.columns={obs="observation.state", reward="next.reward", terminated="next.done", episode="episode_index"}',
    "--set",
    "source.clip_actions=true",
)


def sql(text: str) -> Command:
    return ("lake", "sql", "small", text)


@dataclass(frozen=True)
class Target:
    """A file of the prepared folder, how it is made wrong, and the commands that read it."""

    file: str
    change: Mutation
    commands: tuple[Command, ...]


_CHECKPOINT = "small/checkpoints/000003"
_READ = (INFO, sql("select * from trajectories"), sql("select sum(reward) from steps"), VERIFY, (*TRAIN, 4), SAMPLE)
_READ_WORN = (
    ("lake", "info", "worn"),
    ("lake", "sql", "worn", "select sum(reward), count(distinct trajectory) from steps"),
    ("lake", "verify", "worn"),
    ("lake", "compact", "worn", "--grace", "0s", "--settle", "0s", "-q"),
    ("lake", "expire", "worn", "--max-steps", 100, "--purge", "-q"),
    ("lake", "copy", "worn", "copied", "-q"),
    ("train", "--from-lake", "worn", "--encoder", "feedforward", *tiny(), "-q", "--steps", 1, "--run", "other"),
)
TARGETS = {
    "run.json": Target(
        "small/run.json",
        odd.changed_json,
        (
            EVALUATE,
            LINEAGE,
            sql("select * from runs"),
            (*TRAIN, 4),
            ("export", "small"),
            (*EVALUATE, "--tasks", "true"),
        ),
    ),
    "config.toml": Target(
        "small/config.toml",
        mutations.changed_toml,
        (EVALUATE, (*TRAIN, 3), ("train", "--from-lake", "small", "-c", "small/config.toml", "--dry-run"), LINEAGE),
    ),
    "checkpoint.json": Target(
        f"{_CHECKPOINT}/checkpoint.json",
        odd.changed_json,
        (LINEAGE, EVALUATE, sql("select * from checkpoints"), (*LINEAGE[:2], "small@3")),
    ),
    "sealed checkpoint.json": Target(
        f"{_CHECKPOINT}/checkpoint.json",
        mutations.changed_sealed,
        (LINEAGE, EVALUATE, (*TRAIN, 4), EXPORT),
    ),
    "training.pt": Target(
        f"{_CHECKPOINT}/training.pt",
        mutations.resealed(Path("checkpoint.json"), mutations.odd_pickle),
        ((*TRAIN, 4),),
    ),
    "weights.safetensors": Target(
        f"{_CHECKPOINT}/weights.safetensors",
        mutations.resealed(Path("checkpoint.json"), mutations.odd_tensors),
        (EVALUATE, (*TRAIN, 4)),
    ),
    "metrics.jsonl": Target("small/metrics.jsonl", datasets.changed_lines, (METRICS, (*TRAIN, 4))),
    "evaluation": Target("small/evaluations/*.json", odd.changed_json, (EVALUATE,)),
    "collector": Target(
        "small/lake/collectors/*.json",
        odd.changed_json,
        (LINEAGE, INFO, sql("select * from collectors"), ("lake", "copy", "small", "copied")),
    ),
    "lake.json": Target("small/lake/lake.json", odd.changed_json, _READ),
    "schema": Target("small/lake/schemas/*.json", odd.changed_bytes, _READ),
    "odd schema": Target("small/lake/schemas/*.json", mutations.odd_schema, _READ),
    "segment": Target("small/lake/segments/*/*.arrow", mutations.changed_footer, (*_READ, LINEAGE)),
    "segment's bytes": Target("small/lake/segments/*/*.arrow", odd.changed_bytes, _READ),
    "log": Target("worn/log/*.json", mutations.changed_log, _READ_WORN),
    "log's bytes": Target("worn/log/*.json", odd.changed_bytes, _READ_WORN),
    "manifest": Target("worn/manifests/*", mutations.changed_manifest, _READ_WORN),
    "npz": Target("npz/*.npz", datasets.changed_npz, (taken("npz:npz"),)),
    "hdf5": Target(
        "hdf5/*.hdf5",
        datasets.changed_hdf5,
        (taken("d4rl:hdf5"), taken("d4rl:hdf5", "--env", "gym:CartPole-v1")),
    ),
    "xland": Target("xland.h5", datasets.changed_hdf5, (taken("xland:xland.h5"), taken("xland.h5"))),
    "vintix": Target("hopper/*.h5", datasets.changed_hdf5, (taken("vintix:hopper"),)),
    "minari": Target("minari-v0/data/main_data.hdf5", datasets.changed_hdf5, (taken("minari:minari-v0"),)),
    "minari's metadata": Target(
        "minari-v0/data/metadata.json", datasets.changed_metadata, (taken("minari:minari-v0"),)
    ),
    "parquet": Target("parquet/steps-*.parquet", datasets.changed_parquet, (taken("parquet:parquet"),)),
    "parquet's trajectories": Target(
        "parquet/trajectories.parquet", datasets.changed_parquet, (taken("parquet:parquet"),)
    ),
    "table": Target("lerobot/data/*/*.parquet", datasets.changed_parquet, (TABLE, taken("lerobot:lerobot"))),
    "lerobot's metadata": Target("lerobot/meta/*.json", odd.changed_json, (taken("lerobot:lerobot"),)),
    "lerobot's lines": Target("lerobot/meta/*.jsonl", datasets.changed_lines, (taken("lerobot:lerobot"),)),
    "bundle": Target("small/export/policy.json", mutations.changed_sealed, (ACT, EVALUATE_BUNDLE)),
    "bundle's bytes": Target("small/export/*", odd.changed_bytes, (ACT, EVALUATE_BUNDLE)),
    "bundle's weights": Target(
        "small/export/weights.safetensors", mutations.resealed(Path("policy.json"), mutations.odd_tensors), (ACT,)
    ),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with a lake, a checkpoint, an evaluation and a bundle; its trajectories in other formats. Beside it a lake
    that was maintained."""
    home, before = tmp_path_factory.mktemp("prepared"), Path.cwd()
    os.chdir(home)
    try:
        for command in (
            ("collect", *CARTPOLE, "--run", "small", "--steps", 200, "-q"),
            (*TRAIN, 3),
            EVALUATE,
            ("export", "small", "-q"),
            *(("collect", *CARTPOLE, "--lake", "worn", "--steps", 200, "--seed", seed, "-q") for seed in (1, 2)),
            ("lake", "compact", "worn", "-q"),
            ("collect", *CARTPOLE, "--lake", "worn", "--steps", 200, "--seed", 3, "-q"),
            ("lake", "expire", "worn", "--where", "length < 12", "--purge", "-q"),  # writes a manifest, too
            ("lake", "expire", "worn", "--where", "length < 15", "-q"),
            *(("export", "small/lake", "--format", form, "--to", form, "-q") for form in ("npz", "hdf5", "parquet")),
            ("export", "small/lake", "--format", "minari", "--to", "minari-v0", "-q"),
        ):
            done = call(*command)
            assert done.code == 0, done.err
        for digests in home.glob("*/dataset.json"):  # they would refuse every change before a decoder saw it
            digests.unlink()
        dataset(home / "lerobot", "v2.1")
        xland(home / "xland.h5")
        vintix(home / "hopper" / "hopper.h5", [7, 12, 1], group=8, demonstrator=True)
        yield home
    finally:
        os.chdir(before)


def outcome(command: Command) -> tuple[int, str]:
    """Exit code and story of a command; `ACT` loads the bundle as a library does."""
    if command is not ACT:
        done = call(*command)
        return done.code, done.err
    try:
        load_policy("small/export").act(np.zeros(4, dtype=np.float32))
    except AmagoError as error:
        return error.exit_code, str(error)
    return 0, ""


def attempt(prepared: Path, scratch: Path, name: str, number: int) -> str | None:
    """Make one file wrong and read it; what was not as it should be."""
    target, rng = TARGETS[name], Random(f"{name} {number}")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(prepared, scratch, symlinks=True)
    target.change(rng.choice(sorted(scratch.glob(target.file))), rng)
    command = target.commands[number % len(target.commands)]
    with contextlib.chdir(scratch):
        began = time.process_time()
        try:
            code, err = outcome(command)
        except Exception as error:
            return f"{name} {number}: {command[:3]} raised {type(error).__name__}: {error}"
    if code not in (0, 1, 2, 3, 4) or "Traceback" in err:
        return f"{name} {number}: {command[:3]} ended with {code}: {err[-1500:]}"
    if (took := time.process_time() - began) > SECONDS:
        return f"{name} {number}: {command[:3]} took {took:.0f} s of CPU time"
    return None


def run(prepared: Path, scratch: Path, name: str, numbers: range) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = [text for number in numbers if (text := attempt(prepared, scratch, name, number)) is not None]
    assert not found, f"{len(found)} of {len(numbers)}:\n" + "\n".join(found)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH_KIB


@pytest.mark.trials
@pytest.mark.parametrize("name", TARGETS)
def test_a_few_wrong_files_cause_no_traceback(prepared: Path, tmp_path: Path, name: str) -> None:
    run(prepared, tmp_path / "home", name, range(trials(3, quick=1)))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", TARGETS)
def test_thousands_of_wrong_files_cause_no_traceback(prepared: Path, tmp_path: Path, name: str) -> None:
    run(prepared, tmp_path / "home", name, range(3, 3 + -(-MUTATIONS // len(TARGETS))))
