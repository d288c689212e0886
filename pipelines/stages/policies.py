"""Who acts: a policy from its name, with what a trajectory records of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pipelines.config.model import AgentSettings
from pipelines.config.run_directory import RunDirectory
from pipelines.envs.env import Env
from pipelines.envs.legal import LegalActions
from pipelines.errors import InputMissing
from pipelines.lake.spaces import Spaces
from pipelines.lake.store import difference
from pipelines.learning.acting import AgentPolicy
from pipelines.rollout.policy_client import ExpertPolicy, Policy, RandomPolicy, scripted_policy
from pipelines.training import checkpoint as checkpoints
from pipelines.training.checkpoint import Checkpoint
from pipelines.training.learner import load_agent


@dataclass(frozen=True, kw_only=True)
class Acting:
    """A policy, what it is called, the gradient updates behind it (-1: none, it is not trained), its run, and the
    column by which it knows what is legal."""

    policy: Policy
    policy_id: str
    version: int = -1
    run: Path | None = None
    action_mask: str = ""


def load_policy(name: str, env: Env, *, seed: int, greedy: bool = False, action_mask: str = "") -> Acting:
    """The policy called `name`: random, expert, RUN[@CHECKPOINT] or module:attr. `action_mask` is the column that
    tells the random one what it may do.

    InputMissing where there is none, or where it was trained for other spaces.
    """
    spaces = env.spec.spaces
    if name in ("auto", "random"):
        return random_policy(spaces, seed=seed, action_mask=action_mask)
    if name == "expert":
        return Acting(policy=ExpertPolicy(env), policy_id="expert")
    path = name.partition("@")[0]
    if RunDirectory(path).exists():
        run, checkpoint = load_checkpoint(name)
        acting = trained(checkpoint, env, policy_id=run.identity, seed=seed, greedy=greedy)
        return replace(acting, run=run.path)
    if ":" not in name:
        raise InputMissing(
            f"no run at '{path}' whose policy could act", hint="give random, expert, RUN[@CHECKPOINT] or module:attr"
        )
    policy = scripted_policy(name, spaces=spaces, num_actors=env.num_envs, seed=seed)
    return Acting(policy=policy, policy_id=name)


def random_policy(spaces: Spaces, *, seed: int, action_mask: str = "") -> Acting:
    """UsageError where `action_mask` names no such column."""
    legal = LegalActions(action_mask, spaces) if action_mask else None
    policy = RandomPolicy(spaces.action, seed=seed, legal=legal)
    return Acting(policy=policy, policy_id="random", action_mask=action_mask)


def load_checkpoint(name: str) -> tuple[RunDirectory, Checkpoint]:
    """The checkpoint that RUN[@CHECKPOINT] names, and its run. InputMissing where there is none."""
    path, _, which = name.partition("@")
    run = RunDirectory.open(path)
    return run, checkpoints.load(run.checkpoints, which or "latest")


def trained(
    checkpoint: Checkpoint, env: Env, *, policy_id: str, seed: int, greedy: bool, own: AgentSettings | None = None
) -> Acting:
    """The policy of a checkpoint, acting for all actors of `env`; `own` as for `load_agent`."""
    require_spaces(checkpoint, env)
    agent = load_agent(checkpoint, own=own)
    if env.spec.horizon is not None:
        agent.sequence.require_time(env.spec.horizon - 1)
    with checkpoint.understood():
        policy = AgentPolicy(
            agent,
            num_actors=env.num_envs,
            capacity=checkpoint.record["context_length"],
            greedy=greedy,
            seed=seed,
            precision=checkpoint.record["precision"],
        )
    return Acting(
        policy=policy,
        policy_id=policy_id,
        version=checkpoint.update,
        action_mask=agent.settings.action_mask,
    )


def require_spaces(checkpoint: Checkpoint, env: Env) -> None:
    """InputMissing, with what differs, unless the checkpoint was trained for the spaces of `env`."""
    with checkpoint.understood():
        ours = Spaces.from_json(checkpoint.record["spaces"])
    if ours != env.spec.spaces:
        raise InputMissing(
            f"checkpoint '{checkpoint.path}' was trained for other spaces than those of '{env.spec.name}': "
            + "; ".join(difference(ours, env.spec.spaces, ("trained for", "given"))),
        )
