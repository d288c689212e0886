"""Named sizes of the network: presets of widths and depths, with a suitable learning rate and thread count.

The other settings of a document override its size; a size given as an option or by `--set` overrides the document.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

SizeName = Literal["", "tiny", "small", "base", "large"]
SIZES: tuple[str, ...] = get_args(SizeName)[1:]


@dataclass(frozen=True)
class _Size:
    width: int
    layers: int
    heads: int
    encoder: tuple[int, ...]  # hidden layers of the timestep encoder
    policy: tuple[int, ...]  # and of actor and critics
    critics: int
    train: Mapping[str, Any]


_SIZES = {
    "tiny": _Size(64, 2, 4, (64,), (128, 128), 2, {"learning_rate": 1e-3, "warmup_steps": 100, "threads": 1}),
    "small": _Size(128, 2, 4, (128,), (256, 256), 2, {"learning_rate": 5e-4, "warmup_steps": 200, "threads": 0}),
    "base": _Size(256, 3, 8, (512, 512), (256, 256), 4, {"learning_rate": 1e-4, "warmup_steps": 500, "threads": 0}),
    "large": _Size(512, 6, 8, (512, 512), (512, 512), 4, {"learning_rate": 1e-4, "warmup_steps": 1000, "threads": 0}),
}


def make_preset(size: str, kind: str) -> dict[str, Any]:
    """Make the settings that `size` stands for, with a sequence encoder of this kind; `base` equals the defaults.

    >>> make_preset("tiny", "gru")["agent"]["sequence"]
    {'kind': 'gru', 'hidden': 64, 'output': 64, 'num_layers': 1}
    """
    chosen = _SIZES[size]
    blocks = {"d_model": chosen.width, "num_layers": chosen.layers}
    widths: dict[str, dict[str, Any]] = {  # an encoder without widths, and a plug-in, have none
        "transformer": blocks | {"d_ff": 4 * chosen.width, "num_heads": chosen.heads},
        "feedforward": blocks | {"d_ff": 4 * chosen.width},
        "gru": {"hidden": chosen.width, "output": chosen.width, "num_layers": max(chosen.layers - 1, 1)},
        "mingru": blocks,
        "mamba": blocks,
    }
    agent = {
        "timestep": {"hidden": list(chosen.encoder), "output": chosen.width},
        "sequence": {"kind": kind, **widths.get(kind, {})},
        "actor": {"hidden": list(chosen.policy)},
        "critic": {"hidden": list(chosen.policy), "ensemble": chosen.critics},
    }
    return copy.deepcopy({"agent": agent, "train": dict(chosen.train)})


def find_sequence_kind(document: Mapping[str, Any]) -> str:
    """Find the kind of sequence encoder in a document, which may have values of any type."""
    kind = _look_up(document, "agent", "sequence", "kind")
    return kind if isinstance(kind, str) else "transformer"


def names_network(document: Mapping[str, Any], *, changed: bool = False) -> bool:
    """Check whether a document sets widths or depths; with `changed`, whether any differs from its default."""
    defaults = make_preset("base", find_sequence_kind(document))["agent"]
    paths = {(table, key) for table, keys in defaults.items() for key in keys} - {("sequence", "kind")}
    given = {path: value for path in paths if (value := _look_up(document, "agent", *path)) is not None}
    return any(not changed or value != defaults[table][key] for (table, key), value in given.items())


def _look_up(document: Any, *path: str) -> Any:
    for key in path:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document
