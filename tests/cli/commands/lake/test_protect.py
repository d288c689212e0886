from pathlib import Path

from tests.cli.conftest import Amago


def test_a_checkpoint_keeps_what_it_could_draw(amago: Amago, small: Path) -> None:
    amago("collect", "--env", "gym:CartPole-v1", "--run", small, "--steps", 800, "--actors", 4, "-q")
    steps = amago("lake", "info", small, "--output", "json").json["metrics"]["steps"]
    listed = amago("lake", "protect", small, "--snapshot", small, "--output", "json").json["metrics"]["protected"]
    assert list(listed) == ["small@3"]
    assert amago("lake", "compact", small, "--grace", "0s").code == 0
    done = amago("lake", "expire", small, "--max-steps", 1, "--output", "json").json["metrics"]
    assert 0 < done["steps"] < steps
    assert done["protected"] == done["trajectories_left"] > 0
    uids = amago("lake", "lineage", small, "--trajectories").out.split()
    assert len(uids) == done["protected"]
    assert "small@3" in amago("lake", "protect", small).out
    assert amago("lake", "protect", small, "--off", "small@3").code == 0
    assert amago("lake", "expire", small, "--max-steps", 1).code == 0
    assert amago("lake", "info", small, "--output", "json").json["metrics"]["steps"] <= 1


def test_a_protected_lake_lets_nothing_go(amago: Amago, small: Path) -> None:
    assert amago("lake", "protect", small, "--all").code == 0
    refused = amago("lake", "expire", small, "--max-steps", 1)
    assert refused.code == 2
    assert "amago lake protect" in refused.err
    assert "everything" in amago("lake", "protect", small).out
    assert amago("lake", "protect", small, "--off", "lake").code == 0
    assert amago("lake", "protect", small, "--off", "lake").code == 3
    assert amago("lake", "expire", small, "--max-steps", 1).code == 0


def test_options_that_exclude_one_another_and_another_lake_are_refused(amago: Amago, small: Path) -> None:
    assert amago("lake", "protect", small, "--all", "--off", "x").code == 2
    amago("collect", "--env", "gym:CartPole-v1", "--lake", "other", "--steps", 50, "-q")
    refused = amago("lake", "protect", "other", "--snapshot", small)
    assert refused.code == 3
    assert "was not trained on lake" in refused.err
