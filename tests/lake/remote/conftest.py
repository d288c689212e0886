"""The tests of this folder, asked of two implementations of S3."""

import pytest

from tests.conftest import Server


@pytest.fixture(scope="session", params=["moto", "ministack"])
def s3_server(request: pytest.FixtureRequest, s3_server: Server) -> Server:
    return s3_server if request.param == "moto" else request.getfixturevalue("ministack_server")
