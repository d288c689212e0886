"""Rulesets of XLand-MiniGrid, generated here, or converted from the published ones.

A ruleset is a goal, rules by which tiles turn into others, and the tiles that are in the room at the beginning. A goal
asks for one or two tiles. A tree of rules of some depth makes these from others, no tile is needed twice, and the
tree's leaves are in the room. Some branches are cut: their tile then is in the room itself. Distractors are tiles that
serve nothing, and rules that spoil: they turn only distractors, or a distractor put beside a tile that is needed, into
junk, so a careful agent can always reach the goal. Encodings are xminigrid's; goals (N, 5), rules (N, R, 7) and tiles
(N, T, 2) are uint8, padded with zeros.

The published rulesets are pickles compressed with bz2. A pickle can run code, so no environment opens one: users
convert a benchmark that they have downloaded, once, with a reader that rebuilds arrays of numpy and JAX and refuses
every other object, without importing or calling it.
"""

from __future__ import annotations

import bz2
import contextlib
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipelines.errors import InputMissing, IntegrityError
from pipelines.files.atomic import write_atomically

Kind = Literal["trivial", "small", "medium", "high"]
_Tile = tuple[int, int]

_GOAL_WIDTH, _RULE_WIDTH = 5, 7
_CONVERT = "convert a published benchmark once: pipelines.envs.suites.xland_rulesets.convert('{}', 'NAME.npz')"

# Tiles that can be picked up (ball, square, pyramid, key, hex, star), in every colour but that of the floor.
_SHAPES, _COLORS = (3, 4, 5, 7, 11, 12), (1, 2, 3, 4, 5, 6, 8, 9, 10, 11)
TILES: tuple[_Tile, ...] = tuple((shape, color) for shape in _SHAPES for color in _COLORS)
# Numbers of xminigrid's goals and rules, by how many tiles they take. Goals: hold, be near (on any side, or one of
# four); tile near tile (or on one side of it). Rules: the same, and what comes of it.
GOALS = {1: (1, 3, 11, 12, 13, 14), 2: (4, 7, 8, 9, 10)}
RULES = {1: (1, 2, 8, 9, 10, 11), 2: (3, 4, 5, 6, 7)}


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """`depth` of the tree of rules, chance to cut a branch, most rules that spoil, and tiles that serve nothing."""

    depth: int
    cut: float
    spoilers: int
    distractors: int

    @property
    def rules(self) -> int:
        """Most rules: a full tree, whose goal and rules take two tiles each, and those that spoil."""
        return 2 ** (self.depth + 1) - 2 + self.spoilers

    @property
    def tiles(self) -> int:
        """Most tiles at the beginning."""
        return 2 ** (self.depth + 1) + self.distractors

    def draw(self, rng: np.random.Generator) -> tuple[tuple[int, ...], list[tuple[int, ...]], list[_Tile]]:
        """Draw a goal, rules, and the tiles that are in the room."""
        unused = [TILES[i] for i in rng.permutation(len(TILES))]

        def take(kinds: Mapping[int, tuple[int, ...]]) -> list[_Tile]:
            """Take one or two unused tiles, so that each of the kinds is as likely."""
            return [
                unused.pop() for _ in range(1 + int(rng.random() < len(kinds[2]) / (len(kinds[1]) + len(kinds[2]))))
            ]

        def encode(kinds: Mapping[int, tuple[int, ...]], tiles: list[_Tile], *products: _Tile) -> tuple[int, ...]:
            """Draw a goal or rule that takes these tiles, and encode it."""
            number = kinds[len(tiles)][int(rng.integers(len(kinds[len(tiles)])))]
            return (number, *(entry for tile in (*tiles, *products) for entry in tile))

        wanted = take(GOALS)
        goal = encode(GOALS, wanted)
        rules: list[tuple[int, ...]] = []
        lying: list[_Tile] = []
        level = wanted
        for depth in range(self.depth + 1):
            following: list[_Tile] = []
            for tile in level:
                if depth == self.depth or rng.random() < self.cut:
                    lying.append(tile)
                    continue
                inputs = take(RULES)
                rules.append(encode(RULES, inputs, tile))
                following += inputs
            level = following
        needed, junk = list(lying), [unused.pop() for _ in range(self.distractors)]
        for _ in range(rng.integers(self.spoilers + 1)):
            inputs = [junk[int(rng.integers(len(junk)))]]
            if rng.random() < 0.5:
                others = [tile for tile in (*needed, *junk) if tile != inputs[0]]
                inputs.append(others[int(rng.integers(len(others)))])
            rules.append(encode(RULES, inputs, unused.pop()))
        order = rng.permutation(len(rules))
        return goal, [rules[i] for i in order], needed + junk


DIFFICULTIES: dict[str, Difficulty] = {
    "trivial": Difficulty(depth=0, cut=0.0, spoilers=0, distractors=3),
    "small": Difficulty(depth=1, cut=0.3, spoilers=2, distractors=2),
    "medium": Difficulty(depth=2, cut=0.1, spoilers=3, distractors=2),
    "high": Difficulty(depth=3, cut=0.1, spoilers=4, distractors=1),
}


@dataclass(frozen=True)
class Rulesets:
    """N different rulesets."""

    goals: np.ndarray
    rules: np.ndarray
    tiles: np.ndarray

    def __len__(self) -> int:
        return len(self.goals)

    def split(self, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the numbers of the rulesets to train on, and of the `share` that is held out, in a random order."""
        order = np.random.default_rng([seed, len(self)]).permutation(len(self))
        held_out = round(share * len(self))
        return order[held_out:], order[:held_out]

    @classmethod
    def check(cls, arrays: Sequence[np.ndarray], path: Path) -> Rulesets:
        """Make rulesets of goals, rules and tiles. IntegrityError, which names `path`, for other types or shapes."""
        goals, rules, tiles = arrays
        shapes = [array.shape[1:] for array in arrays]
        fits = (
            all(array.dtype == np.uint8 and len(array) == len(goals) > 0 for array in arrays)
            and shapes[0] == (_GOAL_WIDTH,)
            and rules.ndim == tiles.ndim == 3
            and (shapes[1][-1], shapes[2][-1]) == (_RULE_WIDTH, 2)
        )
        if not fits:
            raise IntegrityError(
                f"'{path}' is not a rulesets file: it needs uint8 goals (N, 5), rules (N, R, 7) and tiles (N, T, 2)"
            )
        return cls(goals, rules, tiles)

    def save(self, path: Path) -> None:
        """Write an npz file whole."""
        write_atomically(
            path, lambda file: np.savez_compressed(file, goals=self.goals, rules=self.rules, tiles=self.tiles)
        )

    @classmethod
    def load(cls, path: Path) -> Rulesets:
        """Read an npz file, without executing anything. InputMissing if there is none, IntegrityError for others."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = [stored[name] for name in ("goals", "rules", "tiles")]
        except FileNotFoundError as error:
            raise InputMissing(f"rulesets file '{path}' does not exist") from error
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            hint = None
            with contextlib.suppress(OSError), path.open("rb") as file:
                if file.read(3) == b"BZh":  # perhaps a published benchmark
                    hint = _CONVERT.format(path)
            raise IntegrityError(f"'{path}' is not a rulesets file: {error}", hint=hint) from error
        return Rulesets.check(arrays, path)

    @classmethod
    def generate(cls, kind: Kind, count: int, seed: int) -> Rulesets:
        """Generate `count` different rulesets of a difficulty. ValueError where there are not so many."""
        difficulty, rng = DIFFICULTIES[kind], np.random.default_rng(seed)
        goals = np.zeros((count, _GOAL_WIDTH), dtype=np.uint8)
        rules = np.zeros((count, difficulty.rules, _RULE_WIDTH), dtype=np.uint8)
        tiles = np.zeros((count, difficulty.tiles, 2), dtype=np.uint8)
        seen: set[bytes] = set()
        tries = 0
        while len(seen) < count:
            tries += 1
            if tries > 20 * count + 1000:
                raise ValueError(f"no {count} different rulesets of difficulty '{kind}' were found")
            goal, made, lying = difficulty.draw(rng)
            code = repr((goal, sorted(made), sorted(lying))).encode()
            if code in seen:
                continue
            row = len(seen)
            seen.add(code)
            goals[row, : len(goal)] = goal
            for place, rule in enumerate(made):
                rules[row, place, : len(rule)] = rule
            tiles[row, : len(lying)] = lying
        return cls(goals, rules, tiles)


_UNREADABLE = (OSError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError, MemoryError)


def convert(published: Path | str, target: Path | str) -> int:
    """Write the rulesets of the file `published` to the npz file `target`; returns their number.

    InputMissing where there is no such file, IntegrityError where it holds anything but rulesets.
    """
    rulesets = read(Path(published))
    rulesets.save(Path(target))
    return len(rulesets)


def read(path: Path) -> Rulesets:
    """Read a published benchmark, such as `medium_1m_v3`. Errors as for `convert`."""
    try:
        with bz2.open(path) as file:
            content = _ArraysOnly(file).load()
        arrays = [np.asarray(content[name]) for name in ("goals", "rules", "init_tiles")]
    except FileNotFoundError as error:
        raise InputMissing(f"rulesets file '{path}' does not exist") from error
    except (pickle.UnpicklingError, *_UNREADABLE) as error:
        raise IntegrityError(f"'{path}' is not a published benchmark of XLand-MiniGrid: {error}") from error
    return Rulesets.check(arrays, path)


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that knows arrays alone."""

    def find_class(self, module: str, name: str) -> Any:
        package = module.replace("numpy.core.", "numpy._core.")
        found = _KNOWN.get((package, name))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not an array")
        return found


def _as_bytes(text: str, encoding: str) -> bytes:
    """Make bytes, as pickles of protocol 2 spell them."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it has text in the encoding '{encoding}'")
    return text.encode(encoding)


def _jax_array(rebuild: Callable[..., np.ndarray], arguments: tuple[Any, ...], state: Any, _: Any) -> np.ndarray:
    """Rebuild the numpy array inside a pickled array of JAX."""
    array = rebuild(*arguments)
    array.__setstate__(state)
    return array


_PLAIN = np.zeros(1)
_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy._core.multiarray", "_reconstruct"): _PLAIN.__reduce__()[0],
    ("numpy._core.numeric", "_frombuffer"): _PLAIN.__reduce_ex__(5)[0],
    ("_codecs", "encode"): _as_bytes,
    ("jax._src.array", "_reconstruct_array"): _jax_array,
}
