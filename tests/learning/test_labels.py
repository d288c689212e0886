"""Imitation of labels: the loss of behaviour cloning, computed by hand from the policy's probabilities."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.errors import IntegrityError
from pipelines.lake.spaces import Spaces
from pipelines.learning.agent import Agent
from pipelines.learning.batch import TensorBatch, require_choices
from tests.learning.factories import ACTIONS, OBSERVATION, agent, values, windows
from tests.learning.test_agent import generator, gradients, in_parts

PLAIN = {"critic": {"hidden": [8], "ensemble": 2, "subset": 2}, "popart": {"enabled": False}}


def labelled_windows(owner: Agent, **options: Any) -> SimpleNamespace:
    source = windows(owner.spaces, **options)
    shape = source.columns["action"].shape[:2]
    source.columns["label"] = values(owner.spaces.action, shape, np.random.default_rng(9))
    return source


def as_batch(owner: Agent, source: SimpleNamespace) -> TensorBatch:
    return TensorBatch.from_numpy(source, owner.spaces, labelled=True)


@pytest.mark.parametrize("action", ["discrete", "multi_discrete", "multi_binary", "box"])
def test_the_loss_is_that_of_the_label_of_the_observation_acted_on(action: str) -> None:
    owner = agent(action, kind="behaviour-cloning", target="label", **PLAIN)
    source = labelled_windows(owner)
    data = as_batch(owner, source)
    loss, metrics = owner.loss(data)
    h = owner.encode(data)
    logs = []
    for window, rows in enumerate(source.lengths.tolist()):
        for row in range(rows - 1):
            params = owner.heads.actor(h[window, row][None])
            label = torch.as_tensor(source.columns["label"][window, row])[None, None]
            logs.append(owner.heads.policy.log_prob(params, label, None).mean())
    torch.testing.assert_close(loss, -torch.stack(logs).mean())
    torch.testing.assert_close(metrics["log_prob"], torch.stack(logs).mean())


def test_what_was_done_is_seen_but_not_imitated() -> None:
    """Other actions change the states, other labels the loss alone."""
    owner = agent("discrete", sequence="gru", kind="behaviour-cloning", target="label", **PLAIN)
    source = labelled_windows(owner)
    before, states = owner.loss(as_batch(owner, source))[0], owner.encode(as_batch(owner, source))
    source.columns["label"] = (source.columns["label"] + 1) % 4
    assert not torch.isclose(owner.loss(as_batch(owner, source))[0], before)
    torch.testing.assert_close(owner.encode(as_batch(owner, source)), states)
    source.columns["action"] = (source.columns["action"] + 1) % 4
    assert not torch.allclose(owner.encode(as_batch(owner, source)), states)


def test_critics_evaluate_actions_and_labels_are_not_filtered() -> None:
    found = {}
    for target in ("action", "label"):
        owner = agent("discrete", sequence="gru", target=target, actor_weight=0.0, bc_weight=1.0, **PLAIN)
        source = labelled_windows(owner)
        data = TensorBatch.from_numpy(source, owner.spaces, labelled=target == "label")
        found[target] = owner.loss(data, generator())[1]
        if target == "label":
            steps = owner.valid_steps(data, owner.encode(data))
            expected = -owner.log_prob(steps).mean()
    torch.testing.assert_close(found["label"]["critic_loss"], found["action"]["critic_loss"])
    torch.testing.assert_close(found["label"]["actor_loss"], expected.detach())
    assert found["action"]["filter_acceptance"] < 1


def test_micro_batches_add_up_to_the_batch() -> None:
    whole = agent("discrete", sequence="gru", target="label", **PLAIN)
    parts = agent("discrete", sequence="gru", target="label", **PLAIN)
    data = as_batch(whole, labelled_windows(whole))
    loss, _ = whole.loss(data, generator())
    loss.backward()
    for part, _ in parts.losses(*in_parts(data, 3)):
        part.backward()
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradients(parts)[name], gradient, msg=name)


def test_labels_outside_their_space_are_damage() -> None:
    spaces = Spaces(observation=OBSERVATION, action=ACTIONS["discrete"])
    source = windows(spaces)
    source.columns["label"] = np.zeros_like(source.columns["action"])
    require_choices(source, spaces)
    source.columns["label"][0, 0] = 4
    with pytest.raises(IntegrityError, match="'label' is outside its space"):
        require_choices(source, spaces)
