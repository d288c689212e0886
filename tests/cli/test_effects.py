"""Every option of a stage has an effect in every mode, or is refused: none is ignored.

An option that is accepted changes the resolved settings; what it changes must be read when the stage is carried out.
The engine's reads are recorded, so this does not repeat the lists by which options are refused.
"""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from amago_cli.app import command
from pipelines.config.base import SettingsModel
from pipelines.config.changes import find_changes, flatten
from pipelines.config.settings import Settings
from pipelines.stages import collect, evaluate, export, ingest, relabel, train
from tests.cli.conftest import Amago, Call, tiny

PLAY = ("--env", "bandit", "--steps", 40, "--actors", 2)
MODES: dict[str, tuple[object, ...]] = {
    "play at random": ("collect", *PLAY, "--run", "new"),
    "play in a lake": ("collect", *PLAY, "--lake", "new"),
    "play by a policy": ("collect", "--run", "small", "--policy", "small", "--add", 20, "--actors", 4),
    "import": ("collect", "--from", "npz:data", "--lake", "new"),
    "resume an import": ("collect", "--run", "imported"),
    "relabel": ("relabel", "--from-lake", "small", "--with", "scale:2"),
    "train": ("train", "--from-lake", "small", "--run", "new", "--steps", 1, *tiny()),
    "train on": ("train", "--from-lake", "small", "--steps", 4),
    "evaluate a run": ("evaluate", "small", "--episodes", 2),
    "evaluate a bundle": ("evaluate", "packed", "--episodes", 2),
    "export a policy": ("export", "small", "--to", "out"),
    "export a policy with a proof": ("export", "small", "--format", "torch", "--to", "out"),
    "export a bundle": ("export", "packed", "--to", "out"),
    "export trajectories": ("export", "small", "--format", "npz", "--to", "out"),
}
STAGES = (collect.run, ingest.run, relabel.run, train.run, evaluate.run, evaluate.run_bundle)
STAGES += (export.run, export.of_bundle, export.dataset)
# Options whose effect is not a setting: places, whether to start over, and the form of the answer.
NO_SETTINGS = {"run", "lake", "from_lake", "source", "fresh", "add", "to", "form", "tournament"}
COMMON = {"config", "assignments", "output", "dry_run", "trust", "quiet", "verbose"}
VALUES = {
    "env": "gym:Acrobot-v1",
    "steps": "77",
    "actors": "3",
    "workers": "2",
    "collectors": "2",
    "engine": "ray",
    "ray": "host:1",
    "on_env_error": "restart",
    "env_timeout": "7",
    "policy": "expert",
    "follow": "small",
    "epsilon": "0.3",
    "explore": None,
    "seed": "9",
    "relabelers": "clip:0..1",
    "strategy": "final",
    "where": "length > 3",
    "fraction": "0.5",
    "copies": "2",
    "agent": "behaviour-cloning",
    "encoder": "gru",
    "size": "small",
    "weight": "length",
    "track": "tensorboard",
    "ranks": "2",
    "episodes": "3",
    "checkpoint": "best",
    "greedy": "--sample",
    "tasks": "success",
    "attempts": "2",
    "label": "expert",
    "opponents": "random",
    "init": "small",
    "like": "small",
    "require": "return_mean > 0",
    "video": "1",
    "evaluators": "2",
    "weights": "float16",
    "card": None,
}
# Read by the command before the engine is called.
BEFORE = {"train.ranks"}


@dataclass
class Reads:
    """Dotted keys of the settings that were read while a stage was carried out."""

    keys: set[str]
    active: bool = False


def tables(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """Yield every table of the settings with its dotted name."""
    yield model, prefix
    for name, field in model.model_fields.items():
        for kind in models_in(field.annotation):
            yield from tables(kind, f"{prefix}{name}.")


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in the type of a field, such as those of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from models_in(part)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Record which settings are read from the moment at which a stage is called."""
    found = Reads(set())
    places: dict[type, list[str]] = {}
    for model, prefix in tables(Settings):
        places.setdefault(model, []).append(prefix)

    def read(self: Any, name: str) -> Any:
        if found.active and name in type(self).model_fields:
            found.keys |= {f"{prefix}{name}" for prefix in places.get(type(self), ())}
        return BaseModel.__getattribute__(self, name)

    monkeypatch.setattr(SettingsModel, "__getattribute__", read, raising=False)
    for stage in STAGES:
        monkeypatch.setattr(sys.modules[stage.__module__], stage.__name__, recording(stage, found))
    return found


def recording(function: Callable[..., Any], found: Reads) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        before, found.active = found.active, True
        try:
            return function(*arguments, **options)
        finally:
            found.active = before

    return call


def options(stage: str) -> Iterator[tuple[str, list[object]]]:
    """Yield every option of a command that gives settings, with words that give it another value."""
    for parameter in command().commands[stage].params:
        name = parameter.name
        if name in NO_SETTINGS | COMMON:
            continue
        if (stage, name) == ("evaluate", "follow"):  # says when to evaluate, not how
            continue
        value = None if (stage, name) == ("train", "follow") else VALUES[name]
        if value is not None and value.startswith("--"):
            yield name, [value]
        else:
            yield name, [parameter.opts[0], *([] if value is None else [value])]


def dry(amago: Amago, *words: object) -> Call:
    return amago(*words, "--dry-run", "--output", "json")


@pytest.mark.parametrize("stage", sorted({str(words[0]) for words in MODES.values()}))
def test_every_option_has_a_value_to_try(stage: str) -> None:
    """Quick, so that a new option is noticed before the night."""
    assert all(words for _, words in options(stage))


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_no_option_is_ignored(amago: Amago, small: Path, reads: Reads, mode: str) -> None:
    assert amago("export", small, "--format", "npz", "--to", "data").code == 0
    assert amago("export", small, "--to", "packed").code == 0
    assert amago("collect", "--from", "npz:data", "--env", "gym:CartPole-v1", "--run", "imported").code == 0
    words = MODES[mode]
    plain = dry(amago, *words)
    assert plain.code == 0, plain.err
    before = flatten(plain.json["settings"])
    changed: dict[str, set[str]] = {}
    for name, given in options(str(words[0])):
        if given[0] in words:
            continue
        looked = dry(amago, *words, *given)
        if looked.code == 0:
            changed[name] = set(find_changes(before, flatten(looked.json["settings"])))
            changed[name] |= {"(does)"} if looked.json.get("does") != plain.json.get("does") else set()
            assert changed[name], f"{given} changes nothing"
        else:
            assert looked.code in (2, 3), looked.err
            assert json.loads(looked.out)["error"]["message"]
    reads.keys.clear()
    done = amago(*words)
    assert done.code == 0, done.err
    ignored = {name: keys for name, keys in changed.items() if not is_read(keys, reads.keys | BEFORE | {"(does)"})}
    assert not ignored


def is_read(changed: set[str], read: set[str]) -> bool:
    """Whether one of the changed keys was read, or a parameter of an environment, which is passed on whole."""
    return any(key in read or key.startswith("env.") for key in changed)


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "small", "--set", "train.steps=5"),
        ("evaluate", "small", "--set", "seed=5"),
        ("evaluate", "small", "--to", "videos"),
        ("evaluate", "small", "--engine", "ray"),
        ("evaluate", "small", "--evaluators", 2, "--ray", "local"),
        ("collect", "--run", "small", "--add", 5, "--set", "train.learning_rate=1"),
        ("collect", "--run", "small", "--add", 5, "--set", "source.steps=5"),
        ("collect", "--run", "small", "--add", 5, "--engine", "ray"),
        ("relabel", "--from-lake", "small", "--set", "train.steps=5"),
        ("train", "--from-lake", "small", "--set", "collect.actors=5"),
        ("train", "--from-lake", "small", "--set", 'train.lakes=["small"]'),
        ("export", "small", "--set", "train.steps=5"),
        ("export", "small", "--format", "npz", "--card"),
        ("export", "small", "--format", "npz", "--checkpoint", "best"),
        ("export", "small", "--set", "export.author=me"),
        ("export", "small", "--where", "success"),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_what_would_have_no_effect_is_refused_in_one_line(amago: Amago, small: Path, words: tuple[object, ...]) -> None:
    refused = amago(*words)
    assert refused.code == 2, refused.err
    assert refused.err.count("error:") == 1
    assert refused.err.count("\n") <= 2
    assert small.exists()


def test_a_new_run_records_settings_for_its_other_stages(amago: Amago) -> None:
    words = ("collect", "--env", "bandit", "--run", "new", "--steps", 40, "--actors", 2, "--set", "train.steps=77")
    assert amago(*words).code == 0
    assert "steps = 77" in Path("new/config.toml").read_text()
