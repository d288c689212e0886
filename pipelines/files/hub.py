"""Files of the Hugging Face Hub, fetched into this user's cache: hf://ORG/NAME[@REVISION][/PATH].

    CACHE/hub/models|datasets/ORG/NAME/COMMIT/NAME/...  files of a commit, which never change
    CACHE/hub/models|datasets/ORG/NAME/COMMIT.json      what the commit has; its time is that of the last use

A revision is resolved to a commit once a process, so that a command sees one state of a branch. A full commit whose
files are in the cache needs no network. Where the cache exceeds `CACHE_BYTES`, commits go that nothing used for
`_IDLE_SECONDS`, the longest unused first.

What is fetched is somebody else's: it is read and checked as any other file. Tokens and mirrors are those of
huggingface_hub (`HF_TOKEN`, `HF_ENDPOINT`).
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pipelines.errors import AmagoError, InputMissing, UsageError
from pipelines.events import Listener, Progress, silent
from pipelines.files.atomic import explain_errors, write_atomically
from pipelines.files.json import read_object
from pipelines.files.locks import hold_lock
from pipelines.files.malformed import reason
from pipelines.files.user_cache import cache_home
from pipelines.registry import require_package

PREFIX = "hf://"
CACHE_BYTES = 256 << 30
BUNDLE_BYTES = 8 << 30
"""Of a policy bundle; a larger one is refused before it is fetched."""

_IDLE_SECONDS = 24 * 3600
_PARALLEL = 8
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ADDRESS = re.compile(
    r"hf://(?:(?P<kind>models|datasets)/)?(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.+-]+))?(?:/(?P<path>.*))?"
)
_GLOB = re.compile(r"[*?\[]")
Kind = Literal["models", "datasets"]


@dataclass(frozen=True)
class HubAddress:
    """A repository at a `revision` ("": its default), and a `path` in it ("": all of it)."""

    kind: Kind
    repository: str
    revision: str = ""
    path: str = ""

    @classmethod
    def parse(cls, text: str, *, kind: Kind) -> HubAddress:
        """Parse hf://ORG/NAME[@REVISION][/PATH]; `kind` unless the text says models/ or datasets/. UsageError for
        anything else."""
        found = _ADDRESS.fullmatch(text)
        path = (found["path"] or "").strip("/") if found else ""
        if found is None or ".." in path.split("/"):
            raise UsageError(
                f"'{text}' is not a place on the Hugging Face Hub", hint="give hf://ORG/NAME[@REVISION][/PATH]"
            )
        named: Any = found["kind"] or kind
        return cls(named, found["repository"], found["revision"] or "", path)

    def __str__(self) -> str:
        revision, path = (f"{sign}{part}" if part else "" for sign, part in (("@", self.revision), ("/", self.path)))
        return f"{PREFIX}{self.repository}{revision}{path}"

    def pin(self) -> HubAddress:
        """Replace the revision by the commit that it stands for."""
        return replace(self, revision=_find_commit(self).name)

    @property
    def folder(self) -> Path:
        """Where the commits of the repository are kept."""
        return cache_home() / "hub" / self.kind / self.repository

    def import_library(self) -> Any:
        """Import huggingface_hub, which then neither draws bars nor logs. InputMissing where it is not installed."""
        require_package("huggingface_hub", "hub", f"'{self}'")
        import huggingface_hub
        from huggingface_hub import utils

        quiet: Any = utils
        quiet.disable_progress_bars()
        quiet.logging.set_verbosity_error()
        return huggingface_hub

    @contextlib.contextmanager
    def explain_errors(self, action: str = "fetch") -> Iterator[None]:
        """Turn whatever the library raises, which depends on its version, into InputMissing."""
        from huggingface_hub import errors

        try:
            yield
        except AmagoError:
            raise
        except errors.GatedRepoError as error:
            hint = f"accept its conditions on the page of {self.repository}, and log in: hf auth login"
            raise InputMissing(f"'{self}' is only for those who accepted its conditions", hint=hint) from error
        except errors.RevisionNotFoundError as error:
            raise InputMissing(f"'{self}': there is no revision '{self.revision or 'main'}'") from error
        except errors.RepositoryNotFoundError as error:
            what = "data set" if self.kind == "datasets" else "model"
            hint = "check its name; log in for a private one: hf auth login"
            raise InputMissing(f"'{self}': the Hub shows no {what} '{self.repository}'", hint=hint) from error
        except Exception as error:
            hint = "repeat the command when the Hub can be reached, or fetch it elsewhere and give its path"
            if action != "fetch":
                hint = "log in with a token that may write there: hf auth login; or export to a directory"
            raise InputMissing(f"cannot {action} '{self}': {reason(error)}", hint=hint) from error

    def upload(self, folder: Path) -> None:
        """Upload the files of a folder to this address in one commit; the repository is made if it is missing.
        InputMissing if the Hub cannot be reached, or refuses it."""
        library = self.import_library()
        with self.explain_errors("upload to"):
            hub = library.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
            where = {"repo_type": self.kind.removesuffix("s"), "repo_id": self.repository}
            hub.create_repo(**where, exist_ok=True)
            hub.upload_folder(
                **where,
                folder_path=folder,
                path_in_repo=self.path or None,
                revision=self.revision or None,
                commit_message="Upload a policy exported by amago",
            )

    def fetch_bundle(self) -> Path:
        """Fetch the policy bundle at this address, without folders in it. Errors as `fetch`."""
        commit = _find_commit(self)
        folder = PurePosixPath(self.path)
        if str(folder / "policy.json") not in commit.files:
            text, hint = f"no policy bundle at '{self}'", "make one with: amago export RUN --card"
            raise InputMissing(text, hint=hint)
        names = [name for name in commit.files if PurePosixPath(name).parent == folder]
        size = sum(commit.files[name] for name in names)
        if size > BUNDLE_BYTES:
            raise InputMissing(f"'{self}' has {size:,} bytes, more than a policy bundle may have ({BUNDLE_BYTES:,})")
        return commit.fetch(names, silent) / self.path

    def fetch(self, listener: Listener = silent) -> str:
        """Fetch the file, the folder or the files that match the pattern at this address, and return their path.

        InputMissing if there are none, the Hub cannot be reached or the disk has no room for them.
        """
        commit = _find_commit(self)
        names = [name for name in commit.files if self._includes(name)]
        if not names:
            known = ", ".join(sorted({name.partition("/")[0] for name in commit.files})[:8])
            raise InputMissing(f"nothing at '{self}'", hint=f"the repository has: {known or 'nothing'}")
        return str(commit.fetch(names, listener) / self.path)

    def _includes(self, name: str) -> bool:
        if _GLOB.search(self.path):
            return fnmatch.fnmatchcase(name, self.path)
        return not self.path or name == self.path or name.startswith(f"{self.path}/")


@dataclass(frozen=True)
class _Commit:
    """A commit of a repository, and the sizes of its `files`, without hidden ones."""

    address: HubAddress
    name: str
    files: dict[str, int]

    @property
    def folder(self) -> Path:
        """Named as the repository is, since an importer names what it reads after its folder."""
        return self.address.folder / self.name / self.address.repository.partition("/")[2]

    def fetch(self, names: Iterable[str], listener: Listener) -> Path:
        """Fetch the files that are missing, and return the folder of the commit."""
        folder = self.folder
        with explain_errors(f"write '{folder}' (AMAGO_CACHE names another place)"):
            folder.mkdir(parents=True, exist_ok=True)
        record = folder.parent.with_suffix(".json")
        with hold_lock(record.with_name(f".{self.name}.lock")):  # one process of a host fetches, the others wait
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                self._download(missing, listener)
            write_atomically(record, json.dumps({"files": self.files}))
        if missing:
            _evict(keep=record)
        return folder

    def _download(self, names: list[str], listener: Listener) -> None:
        total, done = sum(self.files[name] for name in names), 0
        free = shutil.disk_usage(self.folder).free
        if total > free:
            raise InputMissing(
                f"'{self.address}' has {total:,} bytes to fetch, and '{cache_home()}' {free:,} free",
                hint="name fewer files of it: hf://ORG/NAME/PATH; AMAGO_CACHE names another disk",
            )
        library = self.address.import_library()

        def download(name: str) -> str:
            library.hf_hub_download(
                self.address.repository,
                name,
                repo_type=self.address.kind.removesuffix("s"),
                revision=self.name,
                local_dir=self.folder,
                endpoint=os.environ.get("HF_ENDPOINT") or None,
            )
            return name

        with ThreadPoolExecutor(_PARALLEL) as pool, self.address.explain_errors():
            for name in pool.map(download, names):
                done += self.files[name]
                stage = f"fetch {self.address.repository}"
                listener(Progress(stage=stage, done=done, total=total or None, unit="B"))


def is_on_hub(place: Path | str) -> bool:
    """Check whether a place is an address of the Hub."""
    return isinstance(place, str) and place.startswith(PREFIX)


@functools.lru_cache(maxsize=256)
def _find_commit(address: HubAddress) -> _Commit:
    """Ask the Hub which commit an address means, and what it has."""
    if _COMMIT.fullmatch(address.revision):
        known = (read_object(address.folder / f"{address.revision}.json") or {}).get("files")
        if isinstance(known, dict):
            return _Commit(address, address.revision, known)
    library = address.import_library()
    with address.explain_errors():
        found = library.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None).repo_info(
            address.repository,
            repo_type=address.kind.removesuffix("s"),
            revision=address.revision or None,
            files_metadata=True,
        )
        files = {sibling.rfilename: int(sibling.size or 0) for sibling in found.siblings or ()}
        commit = str(found.sha)
    parts = {name: name.split("/") for name in files}
    unsafe = next((name for name, each in parts.items() if {"", "..", "."} & {*each} or "\\" in name), None)
    if unsafe is not None or not _COMMIT.fullmatch(commit):
        raise InputMissing(f"'{address}': the Hub names a file or commit that cannot be one: '{unsafe or commit}'")
    shown = {name: size for name, size in files.items() if not any(part.startswith(".") for part in parts[name])}
    return _Commit(address, commit, shown)


def _evict(keep: Path) -> None:
    """Remove commits that were not used lately, while the cache is larger than it may be, but not that of the record
    `keep`."""
    with hold_lock(cache_home() / "hub" / ".lock"):
        used = {}
        for record in (cache_home() / "hub").glob("*/*/*/*.json"):
            with contextlib.suppress(OSError):
                used[record] = record.stat().st_mtime
        sizes = {
            record: sum(path.stat().st_size for path in record.with_suffix("").rglob("*") if path.is_file())
            for record in used
        }
        total = sum(sizes.values())
        for record in sorted(used, key=lambda record: used[record]):
            if total <= CACHE_BYTES or time.time() - used[record] < _IDLE_SECONDS:
                return
            if record != keep:
                record.unlink(missing_ok=True)  # first: without its record, a commit is not taken for a whole one
                shutil.rmtree(record.with_suffix(""), ignore_errors=True)
                total -= sizes[record]
