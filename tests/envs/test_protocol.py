"""`protocol = "paper"`: other defaults, nothing else."""

from __future__ import annotations

import pytest

from pipelines.envs.make import make
from pipelines.envs.suites.frozen_lake import FrozenLakeSettings
from pipelines.errors import UsageError


def test_a_parameter_that_is_given_keeps_its_value():
    assert FrozenLakeSettings(size=5).held_out == 0.2
    assert FrozenLakeSettings(size=5, protocol="paper").held_out == 0.0
    assert FrozenLakeSettings(size=5, protocol="paper", holdout=0.5).held_out == 0.5


def test_settings_that_were_written_out_are_read_back_the_same():
    settings = FrozenLakeSettings(size=5, protocol="paper")
    assert FrozenLakeSettings.model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize("name", ["meta-frozen-lake", "mazerunner", "alchemy"])
def test_nothing_is_held_out_in_the_papers_protocol(name):
    plain, paper = (make(name, num_envs=1, seed=0, params=params) for params in ({}, {"protocol": "paper"}))
    assert plain.spec.split != paper.spec.split
    assert paper.settings.holdout == 0.0


def test_a_suite_whose_defaults_are_the_papers_has_no_protocol():
    with pytest.raises(UsageError) as caught:
        make("tmaze", num_envs=1, seed=0, params={"protocol": "paper"})
    assert "protocol" in " ".join(caught.value.problems)
