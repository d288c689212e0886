"""Minari's datasets: a folder `data` with `metadata.json`, and episodes in HDF5, Arrow or Parquet files.

Read without the package minari, which only fetches datasets. An episode's observations include the last one. Its seed
is kept, and whether `infos/success` is ever set. Other numeric `infos` become observations when `source.columns` asks
for them, `{"obs.qpos" = "infos/qpos"}`; an export writes them to `infos` again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Notice
from pipelines.files.malformed import read_limited
from pipelines.formats.base import BATCH_BYTES, EPISODE, Request, as_tags, hash_files
from pipelines.formats.intake import DecodedEpisodes, EpisodeValidator, infer_space, match_spaces, read_flags
from pipelines.formats.minari.episodes import (
    INFOS,
    METADATA,
    OUR_INFOS,
    RECORD,
    SPACES,
    ArrowEpisodes,
    Episodes,
    Hdf5Episodes,
    MinariEpisode,
)
from pipelines.formats.minari.spaces import Leaf, SpaceReader
from pipelines.formats.records import read_info, read_spaces
from pipelines.lake.spaces import LENGTH, OBSERVATION, Box, Ragged, Spaces
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo

_ID = re.compile(r"(?:[-_\w][-_\w/]*[-_\w]/)?[-_\w]+?-v\d+")
_TAGS = ("dataset_id", "algorithm_name", "author", "author_email", "code_permalink", "description", "minari_version")


class MinariImporter:
    """The importer of Minari's datasets; see the module."""

    labelled = logp = False

    def __init__(self, request: Request) -> None:
        data = find_data(request.place)
        self._settings = request.settings
        self._what = f"Minari dataset '{data.parent if data.name == 'data' else data}'"
        metadata = self._read_metadata(data / METADATA)
        self.label = (data.parent if data.name == "data" else data).name
        self.env = self.label
        with contextlib.suppress(KeyError, ValueError, TypeError):
            if isinstance(name := json.loads(metadata["env_spec"])["id"], str):
                self.env = f"gym:{name}"
        self.dropped = 0
        jpeg = bool(metadata.get("jpeg_encoding", True))
        reader = SpaceReader(
            self._read_space(metadata, "observation_space"),
            self._read_space(metadata, "action_space"),
            what=self._what,
            jpeg=jpeg,
            max_length=self._settings.max_length,
        )
        self._ours = metadata.get(SPACES)
        self._places = self._choose_infos(json.loads(metadata.get(OUR_INFOS) or "{}"))
        found = read_spaces(self._ours, what=self._what) if self._ours is not None else reader.spaces
        self.spaces = found
        self._leaves = self._find_leaves(reader.leaves)
        self.steps: int | None = int(metadata.get("total_steps", 0)) or None
        self._count = int(metadata.get("total_episodes", 0))
        if not self._count:
            raise InputMissing(f"{self._what} has no episodes")
        # What the collector's record keeps of it, so that an export can say it again.
        self.described = {
            "env_spec": metadata.get("env_spec") or "",
            "observation_space": self._read_space(metadata, "observation_space"),
            INFOS: self._places,
        }
        lists = {name: metadata.get(name) for name in _TAGS}
        self._tags = as_tags(
            {
                name: ", ".join(sorted(map(str, value))) if isinstance(value, list) else str(value or "")
                for name, value in lists.items()
            }
        )
        form = str(metadata.get("data_format", "hdf5"))
        if form not in ("hdf5", "arrow", "parquet"):
            raise InputMissing(f"'{data}' is stored as {form}", hint="known: hdf5, arrow, parquet")
        self._episodes: Episodes = (
            Hdf5Episodes(data, self._leaves, reader.action_jpeg)
            if form == "hdf5"
            else ArrowEpisodes(data, form, self._leaves, reader.action_jpeg)
        )
        if self._ours is None:
            self._take_infos(request)
        if request.spaces is not None:
            shapes = {name: space.shape for name, space in self.spaces.observation.items()}
            self.spaces = match_spaces(shapes, request.spaces, what=self._what)
        self.fingerprint = hash_files([data / METADATA, *self._episodes.files], self._count, self.steps)
        self._intake = EpisodeValidator(
            self.spaces, what=self._what, clip=self._settings.clip_actions, listener=request.listener
        )

    def close(self) -> None:
        self._episodes.close()

    def _read_metadata(self, path: Path) -> dict[str, Any]:
        try:
            metadata = json.loads(read_limited(path))
            if isinstance(metadata, dict):
                return metadata
        except FileNotFoundError as error:
            raise InputMissing(f"'{path.parent}' is not a Minari dataset: it has no {METADATA}") from error
        except OSError as error:
            raise InputMissing(f"cannot read '{path}': {error.strerror or error}") from error
        except (ValueError, RecursionError):
            pass
        raise IntegrityError(f"'{path}' is damaged", hint="fetch or make the dataset again")

    def _read_space(self, metadata: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        if name not in metadata:
            raise InputMissing(f"{self._what} does not say its {name}", hint="update its metadata with minari")
        try:
            return dict(json.loads(metadata[name]))
        except (ValueError, TypeError) as error:
            raise IntegrityError(f"{self._what}: its {name} is damaged", hint="fetch or make it again") from error

    def _choose_infos(self, written: Mapping[str, str]) -> dict[str, str]:
        """Map columns to paths below `infos`: in a dataset that we wrote as `written`, else as the settings ask."""
        if self._ours is not None:
            return dict(written)
        found = {}
        for column, place in self._settings.columns.items():
            root, _, path = place.partition("/")
            if root != INFOS or not path or not column.startswith(f"{OBSERVATION}."):
                raise InputMissing(
                    f'source.columns: "{column}" = "{place}": a Minari dataset keeps its names, and only adds infos',
                    hint='write {"obs.NAME" = "infos/NAME"}',
                )
            found[column] = path
        return found

    def _take_infos(self, request: Request) -> None:
        """Add the infos that are asked for to the observation, and report the others."""
        infos = {name: values for name, values in self._episodes.infos(0).items() if values.dtype.kind in "biuf"}
        found = dict(self.spaces.observation)
        for column, path in self._places.items():
            if path not in infos:
                known = ", ".join(sorted(infos)) or "none"
                raise InputMissing(f"{self._what} has no numeric '{INFOS}/{path}'", hint=f"its numeric infos: {known}")
            if column in found:
                raise InputMissing(f"source.columns: there is a '{column}' already", hint="choose another name")
            found[column] = infer_space(infos[path].shape[1:], infos[path].dtype)
            self._leaves.append(Leaf(column=column, path=tuple(path.split("/")), space=found[column], root=INFOS))
        self.spaces = Spaces(observation=found, action=self.spaces.action)
        if left := sorted(infos.keys() - {"success", *self._places.values()}):
            text = f"{self._what}: infos left out: {', '.join(left)} (source.columns takes some as observations)"
            request.listener(Notice(text=text))

    def _find_leaves(self, leaves: list[Leaf]) -> list[Leaf]:
        """Find the leaves of a dataset that we wrote: ragged columns are texts, or padded beside their length."""
        if self._ours is None:
            return leaves
        spaces = self.spaces.observation
        texts_ = {leaf.column for leaf in leaves if isinstance(leaf.space, Ragged)}
        stored = [name for name in spaces if name.removesuffix(f".{LENGTH}") not in texts_ or name in texts_]
        paths = find_paths([name for name in stored if name not in self._places])
        infos = {name: tuple(path.split("/")) for name, path in self._places.items()}
        found = []
        for name in stored:
            space, path = spaces[name], infos.get(name) or paths[name]
            if isinstance(space, Ragged) and name not in texts_:  # our export stores it as an array
                space = Box(shape=space.shape, dtype=space.dtype)
            found.append(Leaf(column=name, path=path, space=space, root=INFOS if name in infos else "observations"))
        return found

    def batches(self, start: int = 0) -> Iterator[Trajectories]:
        """Yield batches as `Importer` says."""
        held: list[tuple[int, MinariEpisode, dict[str, np.ndarray]]] = []
        size = self.dropped = 0
        for number in range(start, self._count):
            episode = self._episodes.read(number)
            columns = self._check(number, episode)
            if not len(episode.rewards):
                self.dropped += 1
                continue
            held.append((number, episode, columns))
            size += sum(values.nbytes for values in columns.values())
            if size >= BATCH_BYTES:
                yield self._batch(held)
                held, size = [], 0
        if held:
            yield self._batch(held)

    def _check(self, number: int, episode: MinariEpisode) -> dict[str, np.ndarray]:
        """Lay out the observation columns of an episode. IntegrityError if lengths do not agree."""
        columns: dict[str, np.ndarray] = {}
        for leaf in self._leaves:
            values = episode.observations[leaf.column]
            if isinstance(leaf.space, Ragged):
                columns |= leaf.pad(values, what=f"{self._what}, episode {number}")
            else:
                columns[leaf.column] = np.asarray(values)
        steps = len(episode.rewards)
        lengths = {name: len(values) for name, values in columns.items()}
        others = (episode.actions, episode.terminations, episode.truncations)
        if any(length != steps + 1 for length in lengths.values()) or any(len(values) != steps for values in others):
            raise IntegrityError(
                f"{self._what}: episode {number} has {steps} rewards, {len(episode.actions)} actions and "
                f"{max(lengths.values())} observations",
                hint="fetch or make it again",
            )
        self._intake.require_shapes(number, columns, episode.actions)
        return columns

    def _batch(self, held: list[tuple[int, MinariEpisode, dict[str, np.ndarray]]]) -> Trajectories:
        first = held[0][0]
        episodes = [episode for _, episode, _ in held]
        over, cut = self._read_ends(held, "terminations"), self._read_ends(held, "truncations")
        records = [self._read_record(episode) for episode in episodes]
        resets = []  # the rows of soft resets
        for record, episode in zip(records, episodes, strict=True):
            resets.append(np.zeros(len(episode.rewards) + 1, dtype=np.uint8))
            resets[-1][[int(row) for row in (record or {}).get("resets", ())]] = 1
        raw = DecodedEpisodes(
            rows=[len(episode.rewards) + 1 for episode in episodes],
            observation={
                name: np.concatenate([columns[name] for _, _, columns in held]) for name in self.spaces.observation
            },
            action=np.concatenate([np.asarray(episode.actions) for episode in episodes]),
            reward=np.concatenate([episode.rewards for episode in episodes]),
            terminated=over,
            truncated=cut | ~over,
            reset=np.concatenate(resets),
        )
        columns = self._intake.columns(raw, first=first)
        infos = [
            self._info(number, episode, record) for (number, episode, _), record in zip(held, records, strict=True)
        ]
        return Trajectories(columns, raw.rows, infos)

    def _read_ends(self, held: list[tuple[int, MinariEpisode, dict[str, np.ndarray]]], name: str) -> np.ndarray:
        """Read the flag `name` of the last step of each episode, (k,)."""
        what = [(f"{name} of episode {number}", getattr(episode, name)) for number, episode, _ in held]
        return np.array([read_flags(values, said, what=self._what)[-1] for said, values in what])

    def _read_record(self, episode: MinariEpisode) -> Mapping[str, Any] | None:
        text = episode.attributes.get(RECORD)
        return json.loads(text) if isinstance(text, str) else None

    def _info(self, number: int, episode: MinariEpisode, record: Mapping[str, Any] | None) -> TrajectoryInfo:
        tags = {**self._tags, EPISODE: str(number)}
        if record is not None:
            return read_info(record, source="minari", tags=tags)
        seed = int(episode.attributes.get("seed") or 0)
        return TrajectoryInfo(
            env=self.env,
            task=self._settings.task or self.label,
            source="minari",
            seed=seed if seed < 2**63 else 0,  # Minari's may have 64 bits without a sign; 0: unknown
            success=episode.success,
            tags=tags,
        )


def find_paths(columns: list[str]) -> dict[str, tuple[str, ...]]:
    """Find the path of each column in a Minari observation of ours: `obs.a.b` at ("a", "b"), a lone `obs` at ().

    A column whose name others continue lies at "value" below it.
    """
    if columns == ["obs"]:
        return {"obs": ()}
    paths = {name: tuple(name.split(".")[1:]) for name in columns}
    return {
        name: (*path, "value")
        if any(other != path and other[: len(path)] == path for other in paths.values())
        else path
        for name, path in paths.items()
    }


def find_data(place: str) -> Path:
    """Find the folder with `metadata.json` of a dataset given by its folder or its id.

    An id is looked for where minari keeps datasets, and fetched by minari if it is not there. InputMissing if it
    cannot be.
    """
    path = Path(place)
    for folder in (path / "data", path):
        if (folder / METADATA).is_file():
            return folder
    if path.exists():
        raise InputMissing(f"'{path}' is not a Minari dataset: it has no data/{METADATA}")
    if not _ID.fullmatch(place):
        raise InputMissing(
            f"no Minari dataset '{place}'", hint="give its folder, or an id like mujoco/hopper/expert-v0"
        )
    home = Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets")
    folder = home / place / "data"
    if not (folder / METADATA).is_file():
        _fetch(place, home)
    return folder


def _fetch(place: str, home: Path) -> None:
    try:
        import minari
    except ImportError as error:
        raise InputMissing(
            f"no Minari dataset '{place}' in '{home}', and minari is not installed to fetch it",
            hint='pip install "amago[minari]", or give the folder of a dataset',
        ) from error
    try:
        minari.download_dataset(place)
    except Exception as error:  # whatever its stores and their clients raise
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise InputMissing(
            f"cannot fetch Minari dataset '{place}': {reason}",
            hint=f"fetch it elsewhere and give its folder, or put it into '{home}'",
        ) from error
