"""A pytest plugin under which tests of CUDA run without a GPU: `python -m pytest -p tests.fake_cuda.plugin -n 0 FILE`.

Tests that compile, or that measure the memory of a device, are left out. `pipelines` finds flash-attn, mamba-ssm and
torch's varlen attention, whose stand-ins take the same arguments and refuse what the kernels refuse (`packages`).
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.fake_cuda.device import FakeCuda, pretend  # before anything imports torch

import pytest  # isort: skip

pretend()
_LEFT_OUT = {
    "compile": "nothing compiles for a device that is not there",
    "ten_thousand": "measures memory",
    "benchmark": "measures time",
    "bf16_learns": "takes minutes where every operator is a call of Python",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for word, reason in _LEFT_OUT.items():
            if word in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    with FakeCuda():
        return (yield)


@pytest.fixture
def device() -> FakeCuda:
    """The device of this test, which counts."""
    return FakeCuda.now()
