"""A bundle whose policy.json says anything at all, with checksums that fit: loaded as it is, or refused in one line."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.modules.module import register_module_parameter_registration_hook

from pipelines import trust
from pipelines.errors import AmagoError, InputMissing, IntegrityError
from pipelines.export.policy_bundle import load_policy
from pipelines.export.verification import verify
from pipelines.files.checksums import seal
from tests.cli.conftest import call
from tests.fuzz.odd import ODD, places_in
from tests.tiers import examples

ZOO = Path(__file__).parents[2] / "pipelines/zoo/tmaze"
HUGE = (10**6, 10**9, 10**12, 2**62, 10**30)


def forge(folder: Path, *, without: str = "", **changes: Any) -> Path:
    """Write a copy of a bundle of the zoo with changes to policy.json, and with its checksums."""
    if not folder.exists():
        shutil.copytree(ZOO, folder)
    record = json.loads((ZOO / "policy.json").read_bytes())
    files = {name: (folder / name).read_bytes() for name in record.pop("files")}
    record.pop("checksum")
    record.pop(without, None)
    (folder / "policy.json").write_bytes(seal(record | changes, files))
    return folder


RECORD = json.loads((ZOO / "policy.json").read_bytes())
FIELDS = ("agent", "spaces", "context_length", "update", "env", "version", "format")


@pytest.fixture(autouse=True)
def allocated() -> Iterator[list[int]]:
    """The sizes of all parameters that are made, other than outlines without numbers."""
    sizes: list[int] = []
    hook = register_module_parameter_registration_hook(
        lambda module, name, parameter: sizes.append(0 if parameter is None or parameter.is_meta else parameter.numel())
    )
    yield sizes
    hook.remove()


def refusal(use: Callable[[], object]) -> AmagoError | None:
    """What a bundle is refused with; None if it is not."""
    try:
        use()
    except AmagoError as error:
        return error
    return None


COUNTS = [
    ("sequence", "num_layers"),
    ("sequence", "d_model"),
    ("sequence", "d_ff"),
    ("timestep", "output"),
    ("critic", "ensemble"),
]


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("place", COUNTS, ids="-".join)
def test_a_network_larger_than_its_weights_is_never_built(
    tmp_path: Path, allocated: list[int], place: tuple[str, str], value: int
) -> None:
    agent = copy.deepcopy(RECORD["agent"])
    agent[place[0]][place[1]] = value
    with pytest.raises(IntegrityError, match="is damaged"):
        load_policy(forge(tmp_path / "forged", agent=agent))
    assert sum(allocated) == 0


@pytest.mark.parametrize("kind", ["transformer", "mingru", "mamba", "feedforward", "gru"])
def test_another_network_of_a_million_layers_is_never_built(tmp_path: Path, allocated: list[int], kind: str) -> None:
    agent = RECORD["agent"] | {"sequence": {"kind": kind, "num_layers": 10**6}}
    with pytest.raises(IntegrityError, match="is damaged"):
        load_policy(forge(tmp_path / "forged", agent=agent))
    assert sum(allocated) == 0
    assert len(allocated) < 10_000


@pytest.mark.parametrize("value", HUGE[1:])
def test_a_context_that_no_memory_holds_is_refused(tmp_path: Path, value: int) -> None:
    with pytest.raises(IntegrityError, match="is damaged"):
        load_policy(forge(tmp_path / "forged", context_length=value))


@pytest.mark.parametrize("value", [(10**6,) * 10**4, (10**9,), (2**40, 2**40)], ids=["many", "large", "two"])
def test_widths_are_those_of_the_weights(tmp_path: Path, allocated: list[int], value: tuple[int, ...]) -> None:
    agent = RECORD["agent"] | {"actor": {"hidden": value}}
    with pytest.raises(IntegrityError, match="is damaged"):
        load_policy(forge(tmp_path / "forged", agent=agent))
    assert sum(allocated) == 0


@pytest.mark.parametrize("name", [*FIELDS, "greedy"])
def test_a_record_that_lacks_a_field_is_refused(tmp_path: Path, name: str) -> None:
    folder = forge(tmp_path / "forged", without=name)
    with pytest.raises(IntegrityError, match="is damaged"):
        load_policy(folder)
    assert call("evaluate", folder, "--episodes", 1).code == 4
    assert call("export", folder, "--to", tmp_path / "copy").code == 4


@pytest.mark.system
@examples(200)
@given(st.data())
def test_a_changed_record_is_refused_or_loads_within_the_size_of_its_weights(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    document = {name: copy.deepcopy(RECORD[name]) for name in FIELDS}
    for _ in range(data.draw(st.integers(1, 2))):
        places = places_in(document, [])
        where, key = places[data.draw(st.integers(0, len(places) - 1))]
        # A copy: the next change may be inside this value.
        where[key] = copy.deepcopy(data.draw(st.sampled_from([*ODD, *HUGE, -1, 3, [10**6] * 99])))
    folder = forge(tmp_path_factory.mktemp("forged") / "x", **document)
    refused = refusal(lambda: load_policy(folder).act([0.0, 0.0]))
    assert refused is None or "\n" not in str(refused)
    assert refused is None or refused.exit_code == (3 if isinstance(refused, InputMissing) else 4)
    # What acts may act otherwise than was recorded, but nothing is verified that does not load.
    other = refusal(lambda: verify(folder, trust=False))
    assert refused is None or other is not None


@pytest.mark.parametrize(
    "changes",
    [{"version": 2}, {"agent": RECORD["agent"] | {"sequence": {"kind": "evil:Anything"}}}],
    ids=["a newer version", "a module"],
)
def test_verification_refuses_what_loading_refuses(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = forge(tmp_path / "forged", **changes)
    with trust.only(()):
        refused = refusal(lambda: load_policy(folder))
        assert isinstance(refused, InputMissing)
        assert str(refusal(lambda: verify(folder, trust=False))) == str(refused)
