"""Which settings belong to a stage, and which of them may differ between invocations or entries of a chain."""

from __future__ import annotations

from collections.abc import Mapping

# Tables that determine a stage's result: a change in one of them makes it another experiment.
STAGE_TABLES: Mapping[str, tuple[str, ...]] = {
    "collect": ("env", "exploration", "collect", "lake", "source"),
    "train": ("size", "agent", "train", "track"),
    "run": (
        "profile",
        "size",
        "env",
        "exploration",
        "agent",
        "collect",
        "source",
        "lake",
        "relabel",
        "train",
        "track",
        "stages",
    ),
}
# In a chain, environments and model live through all epochs: only these keys may differ between entries.
STAGE_OVERRIDES: Mapping[str, frozenset[str]] = {
    "collect": frozenset({"steps", "policy", "greedy"}),
    "ingest": frozenset(),
    "train": frozenset({"steps", "lakes"}),
}
# How fast a stage goes, and what it keeps of it: the same settings otherwise lead to the same scores.
PACING = frozenset(
    {
        "collect.workers",
        "collect.on_env_error",
        "collect.env_timeout_seconds",
        "collect.reload_seconds",
        "collect.seal_seconds",
        "collect.collectors",
        "collect.engine",
        "collect.ray",
        "collect.cpus",
        "collect.gpus",
        "collect.restarts",
        "source.check",
        "lake.grace_seconds",
        "lake.compact",
        "train.checkpoint_every",
        "train.keep_checkpoints",
        "train.log_every",
        "train.max_skipped",
        "train.ranks",
        "train.rank_timeout",
        "train.shard",
        "train.sharding",
        "train.threads",
        "train.verify",
        "train.packing",
        "train.activation_checkpointing",
        "train.compile",
        "train.follow",
        "train.refresh_seconds",
        "train.publish",
        "train.prefetch",
        "size",  # the settings that it stands for are compared
    }
)
# Targets may change as well between two invocations of one experiment.
EXTENSIBLE = PACING | {
    "collect.steps",
    "collect.chunk_steps",
    "collect.policy",
    "collect.follow",
    "source.steps",
    "lake.max_steps",
    "lake.max_bytes",
    "train.steps",
    "epochs",
}
# Keys that `collect` may change in a run: another behaviour is another collector, which counts its own steps.
BEHAVIOUR = ("exploration.", "collect.greedy", "collect.explore")
