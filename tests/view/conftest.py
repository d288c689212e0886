from pathlib import Path

import pytest

from pipelines.lake.store import Lake


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")
