"""Spaces of a Gymnasium environment as this system describes them."""

from __future__ import annotations

from typing import Any

import gymnasium

from pipelines.envs.spec import ActionCodec, ObservationCodec
from pipelines.lake.spaces import Spaces


def convert_spaces(observation: gymnasium.Space[Any], action: gymnasium.Space[Any], *, name: str) -> Spaces:
    """Return the system's description of an environment's two spaces. UsageError where one is not supported."""
    return Spaces(
        observation=ObservationCodec(observation, name=name).spaces,
        action=ActionCodec(action, name=name).space,
    )
