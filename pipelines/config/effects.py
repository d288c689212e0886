"""Which settings of a call have an effect: one that a stage would ignore is refused.

Only what a call gives by itself is checked. A file or a stored configuration describes all stages of a run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pipelines.errors import UsageError

# Tables and keys that a stage reads.
_READ: Mapping[str, tuple[str, ...]] = {
    "collect": ("env", "exploration", "collect", "lake", "source", "seed", "agent.action_mask", "train.threads"),
    "relabel": ("relabel", "seed"),
    "train": ("size", "agent", "init", "train", "track", "env", "seed"),
    "evaluate": ("env", "evaluate", "collect", "agent", "track", "train.threads"),
    "export": ("export", "evaluate", "env", "collect", "agent", "train.threads"),
}
# An import writes segments as a collector does, and nothing else of [collect] concerns it.
_OF_IMPORTS = ("collect.seal_seconds",)


def refuse_unused(stage: str, keys: Collection[str]) -> None:
    """Raise UsageError if `stage` would ignore one of the dotted `keys`."""
    unused = [key for key in keys if key != "profile" and not _is_in(key, _READ[stage])]
    if unused:
        read = ", ".join(f"[{name}]" if "." not in name else name for name in _READ[stage])
        raise UsageError(
            f"amago {stage} does not use {', '.join(unused)}",
            hint=f"it uses {read}; only a new run records other settings, for its other stages",
        )


def imports_source(source: str, *, is_typed: bool, acting: Sequence[str]) -> bool:
    """Return whether a collect imports `source` instead of playing: unless options about acting were typed.

    `source` is "" where neither the call nor its run has one; `acting` are the options about acting, as they were
    typed. UsageError if this call asks for both.
    """
    if is_typed and acting:
        raise UsageError(
            f"{', '.join(acting)} and --from exclude each other", hint="a dataset is imported without acting"
        )
    return bool(source) and not acting


def acting_keys(keys: Collection[str]) -> list[str]:
    """Return those of the dotted `keys` that an import would ignore."""
    tables = ("collect", "exploration", "agent", "train")
    return [key for key in keys if _is_in(key, tables) and key not in _OF_IMPORTS]


def _is_in(key: str, tables: Collection[str]) -> bool:
    return any(key == table or key.startswith(f"{table}.") for table in tables)
