from __future__ import annotations

import subprocess
import sys

import pytest

from pipelines.errors import Locked
from pipelines.lake.log import lease
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.store import Lake

HOLD = """
import sys
from pipelines.lake.log import lease
from pipelines.lake.store import Lake
with lease(Lake(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(lake: Lake):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lake.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.system
def test_the_second_maintainer_is_told_who_is_the_first(lake: Lake, holder) -> None:
    with (
        pytest.raises(Locked, match=f"is being maintained, pid {holder.pid} on .* since") as refused,
        lease(lake, wait_seconds=0.0),
    ):
        pass
    assert refused.value.exit_code == 75


def test_it_is_waited_for_and_outlives_no_process(lake: Lake, holder) -> None:
    holder.kill()
    compact(lake)
    with lease(lake) as held:
        held()
