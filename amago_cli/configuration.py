"""Options of a call, resolved to one validated settings document.

Defaults < the run's stored configuration < recipe < file < named options and `--set`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amago_cli.options import Common
from amago_cli.render.output import Document
from pipelines.config.load import fold, merge, parse_assignment, resolve
from pipelines.config.places import refuse_scheme
from pipelines.config.recipes import find
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings, TrainSettings
from pipelines.config.sizes import names_network
from pipelines.errors import InputMissing, UsageError, masked
from pipelines.events import Listener, Notice, silent
from pipelines.files.hub import is_on_hub
from pipelines.lake.storage import is_remote
from pipelines.trust import typed

Assignments = list[tuple[tuple[str, ...], Any]]


class Request:
    """Settings that one call gives, by a file, `--set` and named options, to be applied to a base.

    `named` maps dotted settings keys to the values of named options; None means that the option was not given.
    """

    def __init__(
        self, common: Common, named: Mapping[str, Any], *, recipe: Mapping[str, Any] | None = None, source: str = ""
    ) -> None:
        self.file: dict[str, Any] = dict(recipe or {})
        self.source = source or "command line"
        if common.config is not None:
            self.file = merge(self.file, find(common.config)[1])
            self.source = common.config
        typed(self.file)
        self.assignments = _assignments(common.assignments, named)
        self._named = {key for key, value in named.items() if value is not None}
        self._size = ""  # where this call names none

    @property
    def keys(self) -> list[str]:
        """Dotted keys of the settings that named options and `--set` give."""
        return [".".join(path) for path, _ in self.assignments]

    @property
    def set_keys(self) -> list[str]:
        """Those of `keys` that `--set` alone gives."""
        return [key for key in self.keys if key not in self._named]

    def fit(self, run: Path, base: Mapping[str, Any] | None = None, *, listener: Listener = silent) -> Settings:
        """Resolve the settings; if neither size nor width is given and there is no GPU, choose `tiny` and report it.

        A run that has started keeps its network. May import torch to look for a GPU.
        """
        directory = RunDirectory(run)
        if {"train", "run"} & directory.load_record().get("stages", {}).keys():
            if base is None:  # otherwise all of its settings come from the base
                self._size = directory.load_document().get("size", "")
        elif not self._says_size(base or {}):
            train = self._fold(base).get("train")
            device = str(train.get("device", "auto") if isinstance(train, Mapping) else "auto")
            has_gpu = device.startswith("cuda")
            if device == "auto":
                import torch

                has_gpu = torch.cuda.is_available()
            if not has_gpu:
                self._size = "tiny"
                text = "no GPU found: using a tiny network; --size small, base or large chooses another"
                listener(Notice(stage="train", text=text))
        return self.settings(base)

    def _says_size(self, base: Mapping[str, Any]) -> bool:
        given = self.document()
        sized = given.get("size") or base.get("size")
        return bool(sized) or names_network(given) or names_network(base, changed=True)

    def _fold(self, base: Mapping[str, Any] | None) -> dict[str, Any]:
        return fold(self.file, self.assignments, stored=base, source=self.source)

    def settings(self, base: Mapping[str, Any] | None = None) -> Settings:
        """Resolve and validate the settings. UsageError lists every problem."""
        from pipelines.rollout.environment import find_env_model

        return resolve(
            self.file, self.assignments, env_model=find_env_model, stored=base, size=self._size, source=self.source
        )

    def document(self) -> dict[str, Any]:
        """Fold the settings that this call gives, without a base, into a document."""
        return self._fold(None)

    def profile(self) -> str:
        """Name the profile that this call chooses, unless the file records it already; "" if there is none."""
        asked = {(*path,): value for path, value in self.assignments}.get(("profile",), "")
        return asked if isinstance(asked, str) and asked != self.file.get("profile") else ""

    def environment(self) -> str:
        """Name the environment that this call gives; "" if it gives none."""
        return _name_in(self.document(), "env")

    def source_name(self, base: Mapping[str, Any]) -> str:
        """Name the dataset that this call or its `base` gives; "" if neither does."""
        return _name_in(self._fold(base), "source")


def _name_in(document: Mapping[str, Any], table: str) -> str:
    entry = document.get(table)
    name = entry.get("name") if isinstance(entry, Mapping) else None
    return name if isinstance(name, str) else ""


def exclude(options: Mapping[str, Any]) -> None:
    """Raise UsageError where more than one of `options` was given."""
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", hint="give one of them")


def load_stored(directory: Path | None) -> dict[str, Any]:
    """Load the configuration of the run at `directory`; empty if there is none."""
    return RunDirectory(directory).load_document() if directory is not None else {}


def refuse_idle_engine(settings: Settings, keys: Sequence[str], *, processes: int, option: str) -> None:
    """Raise UsageError if this call chooses an engine for one process, or a Ray cluster that no process would use.

    `option` names the option that makes several `processes`.
    """
    given = [key for key in keys if key in ("collect.engine", "collect.ray", "collect.cpus", "collect.gpus")]
    if given and processes == 1:
        raise UsageError(f"{', '.join(given)}: there is one process, which runs here", hint=f"give {option} N")
    if settings.collect.engine != "ray" and (given := [key for key in given if key != "collect.engine"]):
        raise UsageError(f"{', '.join(given)}: only --engine ray uses it", hint="give --engine ray")


def read_plan(directory: Path | None) -> Mapping[str, Any] | None:
    """Read the plan from which the settings of the run at `directory` were chosen; None if they were not."""
    recipe = RunDirectory(directory).load_record().get("recipe") if directory is not None else None
    plan = recipe.get("plan") if isinstance(recipe, Mapping) else None
    return plan if isinstance(plan, Mapping) else None


def preview(
    common: Common,
    settings: Settings,
    *,
    writes: Mapping[str, Path | str],
    does: str = "",
    plan: Mapping[str, Any] | None = None,
) -> Document:
    """Write the output of `--dry-run`: settings as TOML that can be run, and comments on what the stage would do.

    Comments say where it would write, and with a `plan` why each setting was chosen.
    """
    import tomli_w

    document = settings.document()
    for place in writes.values():
        if isinstance(place, Path) or not (is_remote(place) or is_on_hub(place)):
            refuse_scheme(place)
    command = common.invocation.command
    lines = [f"# {command} would {does}"] if does else []
    lines += [f"# {command} would write {what}: {path}" for what, path in writes.items()]
    if plan is not None:
        lines += ["#", *(f"# {line}" for line in tabulate_choices(plan)), ""]
    text = "\n".join([*lines, tomli_w.dumps(document)])
    if masked(text) != text:
        raise UsageError("an address contains credentials", hint="give them by AWS_PROFILE instead")
    return Document(
        text=text,
        status="skipped",
        fields={"outputs": list(writes.values()), "settings": document, **(plan or {})}
        | ({"does": does} if does else {}),
    )


def describe_device(settings: TrainSettings) -> str:
    """Say where updates are computed, and in which precision, such as "on cpu in float32". Imports torch."""
    from pipelines.learning.checkpoint import resolve_device
    from pipelines.nets.compute import choose_precision

    try:
        device = resolve_device(settings.device)
    except InputMissing:  # on the machine that trains it may be there
        return f"on {settings.device}"
    return f"on {device} in {choose_precision(settings.precision, device)}"


def tabulate_choices(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of the settings that were chosen for a run without a recipe, with the reasons."""
    from amago_cli.render.table import render
    from pipelines.events import duration
    from pipelines.stages.make_recipe import read_budget

    def show(setting: str, value: Any) -> str:
        if setting == "stages":
            return ", ".join(dict.fromkeys(entry["stage"] for entry in value))
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return ", ".join(str(entry.get("kind", entry)) for entry in value)
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

    expected = plan.get("expected_seconds")
    takes = f", about {duration(expected)}" if isinstance(expected, int) else ""
    rows = [(row["setting"], show(row["setting"], row["value"]), row["reason"]) for row in plan["choices"]]
    title = f"choices for {read_budget(plan).text}{takes}"
    return render(("setting", "value", "reason"), rows, show=str, title=title)


def _assignments(texts: Sequence[str], named: Mapping[str, Any]) -> Assignments:
    """Combine named options and `--set`; refuse a key that is given twice with different values."""
    problems: list[str] = []
    chosen: dict[tuple[str, ...], Any] = {tuple(key.split(".")): v for key, v in named.items() if v is not None}
    for text in texts:
        try:
            path, value = parse_assignment(text)
        except UsageError as error:
            problems.append(str(error))
            continue
        key = tuple(path)
        if key in chosen and chosen[key] != value:
            problems.append(f"{'.'.join(key)}: given twice, as {chosen[key]!r} and as {value!r}")
        if any(isinstance(named.get(".".join(key[:end])), Mapping) for end in range(1, len(key))):
            problems.append(f"{'.'.join(key)}: given twice, also by an option that sets the whole table")
        chosen[key] = value
    if problems:
        raise UsageError("invalid options", problems=tuple(problems))
    return list(chosen.items())
