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
# Targets and pacing may change between two invocations of one experiment.
EXTENSIBLE = frozenset(
    {
        "collect.steps",
        "collect.workers",
        "collect.on_env_error",
        "collect.env_timeout_seconds",
        "collect.policy",
        "collect.follow",
        "collect.reload_seconds",
        "collect.seal_seconds",
        "collect.collectors",
        "collect.engine",
        "collect.ray",
        "collect.cpus",
        "collect.gpus",
        "collect.restarts",
        "source.steps",
        "source.check",
        "lake.max_steps",
        "lake.max_bytes",
        "lake.grace_seconds",
        "lake.compact",
        "train.steps",
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
        "epochs",
        "size",  # the settings that it stands for are compared
    }
)
# Keys that `collect` may change in a run: another behaviour is another collector, which counts its own steps.
BEHAVIOUR = ("exploration.", "collect.greedy", "collect.explore")
