from pathlib import Path

import pytest

from tests.cli.conftest import Amago


@pytest.mark.system
def test_it_says_what_it_would_do_and_then_does_it(amago: Amago, small: Path) -> None:
    amago("collect", "--env", "gym:CartPole-v1", "--run", small, "--steps", 600, "--actors", 4, "-q")
    segments = sorted((small / "lake/segments").glob("*/*.arrow"))
    seen = amago("lake", "compact", small, "--dry-run", "--output", "json").json
    assert seen["metrics"]["dry_run"] is True
    assert sorted((small / "lake/segments").glob("*/*.arrow")) == segments
    done = amago("lake", "compact", small, "--grace", "0s", "--output", "json").json
    assert done["status"] == "done"
    for figures in (seen["metrics"], done["metrics"]):
        assert (figures["segments_before"], figures["segments_after"]) == (len(segments), 1)
        assert figures["rewritten"] == len(segments)
    assert done["metrics"]["removed"] == len(segments)
    assert len(list((small / "lake/segments").glob("*/*.arrow"))) == 1
    again = amago("lake", "compact", small)
    assert "nothing to do" in again.out
    assert amago("lake", "verify", small).code == 0
    assert amago("evaluate", small, "--episodes", 2, "-q").code == 0


def test_a_size_that_is_none_is_refused(amago: Amago, small: Path) -> None:
    call = amago("lake", "compact", small, "--small", "much")
    assert call.code == 2
    assert "'much' is not a size" in call.err
    assert amago("lake", "compact", small, "--small", "2GB", "--target", "1GB").code == 2
