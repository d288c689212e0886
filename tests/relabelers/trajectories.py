"""Trajectories to relabel, and what becomes of them."""

from __future__ import annotations

import hashlib

import numpy as np

from pipelines.envs.make import make
from pipelines.lake.schema import Schema
from pipelines.lake.trajectory import Trajectory
from pipelines.rollout.policies import RandomPolicy
from pipelines.rollout.rollout import Recording, Rollout


def collected(name, *, seed, steps=400, **params):
    """The schema of an environment, and what a random policy does there."""
    env = make(name, num_envs=4, seed=seed, params=params)
    found = []

    def sink(ended):
        found.extend(Trajectory(each.columns, each.info, uid=uid(len(found) + i)) for i, each in enumerate(ended))

    Rollout(env, RandomPolicy(env.spec.spaces.action, seed=seed), recording=Recording(sink=sink)).run(steps=steps)
    return Schema(env.spec.spaces), found


def uid(number):
    return hashlib.md5(str(number).encode()).hexdigest()


def laid(each):
    """Columns of several trajectories one after another, and the rows of each."""
    columns = {name: np.concatenate([one[name] for one in each]) for name in each[0]}
    return columns, np.array([len(one["reward"]) for one in each])


def derive(chain, trajectories, copies=0):
    columns, rows = laid([each.columns for each in trajectories])
    uids = np.array([bytes.fromhex(each.uid) for each in trajectories], "S16")
    return chain.derive({name: columns[name] for name in chain.reads}, rows, uids, copies)


def applied(derived, trajectories):
    """Yield the columns of each derived trajectory, with those that it shares with its base."""
    for number, place in enumerate(derived.place.tolist()):
        first, rows, offset = derived.first[number], derived.rows[number], derived.offset[number]
        whole = {n: column[offset : offset + rows].copy() for n, column in trajectories[place].columns.items()}
        yield whole | {n: column[first : first + rows] for n, column in derived.columns.items()}
