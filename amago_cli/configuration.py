"""Options of a call, resolved to one validated settings document.

Defaults < the run's stored configuration < recipe < file < named options and `--set`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amago_cli.options import Common
from amago_cli.render.output import Document
from pipelines.config.lakes import refuse_scheme
from pipelines.config.load import fold, merge, parse_assignment, resolve
from pipelines.config.recipes import find
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.config.sizes import names_network
from pipelines.errors import UsageError, masked
from pipelines.events import Listener, Notice, silent
from pipelines.lake.storage import is_remote
from pipelines.trust import typed

Assignments = list[tuple[tuple[str, ...], Any]]


class Request:
    """Settings that one call gives (a file, `--set`, named options), to be applied to a base.

    `named` maps dotted settings keys to the values of named options; None means the option was not given.
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

    def fitted(self, run: Path, base: Mapping[str, Any] | None = None, *, listener: Listener = silent) -> Settings:
        """Resolve the settings; if neither size nor width is given and there is no GPU, choose `tiny` and report it.

        A run that has started keeps its network. May import torch to look for a GPU.
        """
        directory = RunDirectory(run)
        if {"train", "run"} & directory.load_record().get("stages", {}).keys():
            if base is None:  # otherwise all of its settings come from the base
                self._size = directory.load_document().get("size", "")
        elif not self._says_size(base or {}):
            train = self._fold(base).get("train")
            if not _has_gpu(train.get("device", "auto") if isinstance(train, Mapping) else "auto"):
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
        """Return the validated settings. UsageError lists every problem."""
        from pipelines.rollout.environment import env_model

        return resolve(
            self.file, self.assignments, env_model=env_model, stored=base, size=self._size, source=self.source
        )

    def document(self) -> dict[str, Any]:
        """Return the settings that this call gives, as a document."""
        return self._fold(None)

    def profile(self) -> str:
        """Return the profile that this call chooses and the file does not record; "" if none."""
        asked = {(*path,): value for path, value in self.assignments}.get(("profile",), "")
        return asked if isinstance(asked, str) and asked != self.file.get("profile") else ""

    def environment(self) -> str:
        """Return the environment's name as given by this call; "" if it is not."""
        return _name_in(self.document(), "env")

    def source_name(self, base: Mapping[str, Any]) -> str:
        """Return the dataset that this call or its `base` names; "" if neither does."""
        return _name_in(self._fold(base), "source")


def _name_in(document: Mapping[str, Any], table: str) -> str:
    entry = document.get(table)
    name = entry.get("name") if isinstance(entry, Mapping) else None
    return name if isinstance(name, str) else ""


def _has_gpu(device: Any) -> bool:
    """Return whether networks will be trained on a GPU, by `train.device`."""
    if device != "auto":
        return str(device).startswith("cuda")
    import torch

    return torch.cuda.is_available()


def exclude(options: Mapping[str, Any]) -> None:
    """Raise UsageError where more than one of `options` was given."""
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", hint="give one of them")


def stored(directory: Path | None) -> dict[str, Any]:
    """Return the configuration of the run at `directory`; empty if there is none."""
    return RunDirectory(directory).load_document() if directory is not None else {}


def refuse_idle_engine(settings: Settings, keys: Sequence[str], *, processes: int, option: str) -> None:
    """Raise UsageError if this call chooses where several `processes` run, and there is one, or chooses a Ray cluster
    that is not used. `option`: the one that makes them several."""
    given = [key for key in keys if key in ("collect.engine", "collect.ray", "collect.cpus", "collect.gpus")]
    if given and processes == 1:
        raise UsageError(f"{', '.join(given)}: there is one process, which runs here", hint=f"give {option} N")
    if settings.collect.engine != "ray" and (given := [key for key in given if key != "collect.engine"]):
        raise UsageError(f"{', '.join(given)}: only --engine ray uses it", hint="give --engine ray")


def read_plan(directory: Path | None) -> Mapping[str, Any] | None:
    """Return what the settings of the run at `directory` were chosen from; None if they were not."""
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
    """Return the output of `--dry-run`: what the stage would do, where it would write, the table of a `plan`, and the
    settings as TOML that can be run."""
    import tomli_w

    from amago_cli.render.choices import table_of_choices

    document = settings.document()
    for place in writes.values():
        if not is_remote(place) or isinstance(place, Path):
            refuse_scheme(place)
    command = common.invocation.command
    lines = [f"# {command} would {does}"] if does else []
    lines += [f"# {command} would write {what}: {path}" for what, path in writes.items()]
    if plan is not None:
        lines += ["#", *(f"# {line}" for line in table_of_choices(plan)), ""]
    text = "\n".join([*lines, tomli_w.dumps(document)])
    if masked(text) != text:
        raise UsageError("an address contains credentials", hint="give them by AWS_PROFILE instead")
    return Document(
        text=text,
        status="skipped",
        fields={"outputs": list(writes.values()), "settings": document, **(plan or {})}
        | ({"does": does} if does else {}),
    )


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
