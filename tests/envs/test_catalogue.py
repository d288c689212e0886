"""The catalogue of environments, and the pages that are generated from it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pipelines.envs.suites import catalogue
from pipelines.envs.suites.catalogue import ENTRIES, brief

pytestmark = pytest.mark.extras
ROOT = Path(__file__).resolve().parents[2]


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current():
    for page, text in generator().pages().items():
        assert page.read_text() == text, f"{page.name} is outdated: run python docs/generate.py"


def test_pages_contain_every_environment():
    [page] = [text for path, text in generator().pages().items() if path.name == "environments.md"]
    for entry in ENTRIES:
        assert f"`{entry.name}`" in page


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_is_complete(entry):
    module, _, name = entry.suite_class.partition(":")
    source = (Path(catalogue.__file__).parent / f"{module}.py").read_text()
    assert f"class {name}(" in source or f"class {name}:" in source
    for field in ("about", "observation", "action", "horizon", "termination", "split"):
        assert getattr(entry, field), f"{entry.name} has no {field}"
    for field in ("observation", "action", "split"):
        assert len(brief(getattr(entry, field))) <= 60, f"{entry.name}: the short form of {field} is long"


def test_an_exact_name_comes_before_the_pattern_that_it_matches():
    for place, entry in enumerate(ENTRIES):
        earlier = [other.name for other in ENTRIES[:place] if other.matches(entry.name)]
        assert entry.is_pattern or not earlier
