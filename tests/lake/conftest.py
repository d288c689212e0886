import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.lake.store import Lake
from tests.lake.servers import azurite as azurite
from tests.lake.servers import azurite_server as azurite_server
from tests.lake.servers import ministack as ministack
from tests.lake.servers import ministack_server as ministack_server


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB, one of them taken by a file `ballast`."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", mount], capture_output=True)
    if done.returncode:
        pytest.skip("mounting is not allowed here")
    (mount / "ballast").write_bytes(bytes(1 << 20))
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
