"""Bundles and datasets of the Hugging Face Hub, from a server of this host."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.config.places import find_bundle, locate_in_zoo
from pipelines.config.policy_files import PolicySource
from pipelines.config.settings import SourceSettings
from pipelines.errors import InputMissing, IntegrityError, UsageError
from pipelines.events import Event, Progress
from pipelines.export.policy_bundle import load_policy
from pipelines.files import hub as files
from pipelines.files.hub import HubAddress
from pipelines.formats.make import find_requirement, open_importer
from pipelines.rollout.policies import load_trained
from tests.cli.conftest import Amago, call
from tests.files.hub_server import Hub, serve
from tests.formats.d4rl_data import flat, write

pytest.importorskip("huggingface_hub")
pytest.importorskip("h5py")
POLICY = "hf://me/tmaze"


@pytest.fixture
def amago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Amago:
    monkeypatch.chdir(tmp_path)
    return call


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub whose repository me/tmaze has a bundle of the zoo; what is fetched goes into tmp_path / "cache"."""
    shutil.copytree(locate_in_zoo("zoo:tmaze"), tmp_path / "site/models/me/tmaze/main")
    (tmp_path / "site/models/me/tmaze/main/.gitattributes").write_text("*.npz filter=lfs\n")
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "cache"))
    with serve(tmp_path / "site") as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        files._find_commit.cache_clear()
        yield served
    files._find_commit.cache_clear()


def another_process() -> None:
    files._find_commit.cache_clear()


def offer(tmp_path: Path, name: str) -> Path:
    """Put a file of two trajectories into the dataset me/NAME."""
    folder = tmp_path / "site/datasets/me" / name / "main"
    folder.mkdir(parents=True)
    return write(folder / "hopper.hdf5", flat([4, 5]))


def downloads(hub: Hub) -> list[str]:
    return sorted(line.rpartition("/")[2] for line in hub.asked if line.startswith("GET") and "/resolve/" in line)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("hf://a/b", HubAddress("models", "a/b")),
        ("hf://a/b.c@v1.0", HubAddress("models", "a/b.c", "v1.0")),
        ("hf://a/b@main/x/y.npz", HubAddress("models", "a/b", "main", "x/y.npz")),
        ("hf://a/b/x/", HubAddress("models", "a/b", "", "x")),
        ("hf://datasets/a/b/*.h5", HubAddress("datasets", "a/b", "", "*.h5")),
        *[(text, None) for text in ("hf://", "hf://a", "hf://a/b@", "hf://a/b/../c", "hf://a b/c", "s3://a/b")],
    ],
)
def test_addresses_are_parsed(text: str, address: HubAddress | None) -> None:
    if address is None:
        with pytest.raises(UsageError, match="not a place on the Hugging Face Hub"):
            HubAddress.parse(text, kind="models")
    else:
        assert HubAddress.parse(text, kind="models") == address


def test_a_bundle_is_fetched_once_and_is_what_was_there(hub: Hub) -> None:
    found, wanted = find_bundle(POLICY), locate_in_zoo("zoo:tmaze")
    assert found is not None
    names = sorted(path.name for path in wanted.iterdir())
    assert sorted(path.name for path in found.iterdir() if path.name != ".cache") == names
    assert all((found / name).read_bytes() == (wanted / name).read_bytes() for name in names)
    another_process()
    assert find_bundle(POLICY) == found
    assert downloads(hub) == names
    commit = hub.commit("models", "me/tmaze")
    pinned = find_bundle(f"{POLICY}@{commit}")
    hub.url, hub.asked = "", []
    another_process()
    assert find_bundle(f"{POLICY}@{commit}") == pinned == found
    assert not hub.asked, "a commit that is here needs no network"


def test_revisions_and_folders_are_told_apart(hub: Hub, tmp_path: Path) -> None:
    shutil.copytree(locate_in_zoo("zoo:cartpole"), tmp_path / "site/models/me/tmaze/v2/deep/one")
    found = find_bundle(f"{POLICY}@v2/deep/one")
    assert found is not None
    assert load_trained(f"{POLICY}@v2/deep/one").identity == load_trained("zoo:cartpole").identity
    assert load_trained(POLICY).identity == load_trained("zoo:tmaze").identity


def test_a_branch_that_moves_is_followed_by_the_next_process(hub: Hub, tmp_path: Path) -> None:
    first = find_bundle(POLICY)
    (tmp_path / "site/models/me/tmaze/main/notes.txt").write_text("more")
    assert find_bundle(POLICY) == first
    another_process()
    assert find_bundle(POLICY) != first


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf://me/none", "'hf://me/none': the Hub shows no model 'me/none'"),
        (f"{POLICY}@v9", "there is no revision 'v9'"),
        (f"{POLICY}/deep", "no policy bundle at 'hf://me/tmaze/deep'"),
    ],
)
def test_what_is_not_there_is_one_line(hub: Hub, name: str, words: str) -> None:
    with pytest.raises(InputMissing, match=words) as caught:
        find_bundle(name)
    assert "\n" not in caught.value.message


def test_a_hub_that_cannot_be_reached_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(InputMissing, match=f"cannot fetch '{POLICY}'") as caught:
        find_bundle(POLICY)
    assert "\n" not in caught.value.message


def test_without_the_package_it_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "huggingface_hub" else find_spec(name)
    )
    assert find_requirement("hf://me/data") == ("hub", False)
    with pytest.raises(InputMissing, match="needs huggingface_hub, which is not installed") as caught:
        find_bundle("hf://me/elsewhere")
    assert caught.value.hint == 'pip install "amago[hub]"'


def test_an_altered_bundle_is_refused_as_any_other(hub: Hub, tmp_path: Path) -> None:
    weights = tmp_path / "site/models/me/tmaze/main/weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(IntegrityError, match=r"weights\.safetensors"):
        load_policy(POLICY)


@pytest.mark.system
def test_names_of_modules_in_a_bundle_are_not_trusted(hub: Hub, tmp_path: Path, amago: Amago) -> None:
    from pipelines.files.checksums import parse_sealed, seal

    main = tmp_path / "site/models/me/tmaze/main"
    record = parse_sealed((main / "policy.json").read_bytes(), "policy.json")
    contents = {name: (main / name).read_bytes() for name in record["files"]}
    record["env"] = {"name": "gym:evil:Env-v0"}
    (main / "policy.json").write_bytes(seal({k: v for k, v in record.items() if k != "files"}, contents))
    done = amago("evaluate", POLICY, "--episodes", 1)
    assert done.code == 3
    assert "would import the module 'evil'" in " ".join(done.err.split())


@pytest.mark.parametrize("name", ["../../escape.npz", "/etc/passwd", "a/../../b", "x\\..\\y"])
def test_names_that_leave_the_folder_are_refused(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.named[name] = 3
    with pytest.raises(InputMissing, match="a file or commit that cannot be one"):
        find_bundle(POLICY)


def test_sizes_are_bounded_before_anything_is_fetched(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.named["huge.npz"] = 9 << 30
    with pytest.raises(InputMissing, match="more than a policy bundle may have"):
        find_bundle(POLICY)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(InputMissing, match="bytes to fetch, and") as caught:
        HubAddress.parse(POLICY, kind="models").fetch()
    assert "AMAGO_CACHE" in str(caught.value.hint)
    assert not downloads(hub)


@pytest.mark.system
def test_the_cache_forgets_what_was_unused_the_longest(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CACHE_BYTES", 1)
    main = tmp_path / "site/models/me/tmaze/main"
    found: list[Path] = []
    for number in range(3):
        (main / "notes.txt").write_text(str(number))
        another_process()
        place = find_bundle(POLICY)
        assert place is not None
        found.append(place)
        # All are younger than a day: none goes, though the cache is too large.
        assert all(each.is_dir() for each in found)
    day_before = (main / "notes.txt").stat().st_mtime - 2 * 24 * 3600
    for place in found[1:]:
        os.utime(place.parent.with_suffix(".json"), (day_before, day_before))
    (main / "notes.txt").write_text("last")
    another_process()
    last = find_bundle(POLICY)
    assert [each.is_dir() for each in (*found, last)] == [True, False, False, True]


def test_datasets_are_read_as_local_ones(hub: Hub, tmp_path: Path) -> None:
    local = offer(tmp_path, "data")
    main = local.parent
    (main / "more").mkdir()
    rows = {"obs": np.arange(3.0), "action": np.zeros(3), "reward": np.zeros(3), "terminated": np.arange(3) == 2}
    for name in ("a.parquet", "b.parquet"):
        pq.write_table(pa.table(rows), main / "more" / name)
    (main / "README.md").write_text("# Data")

    def lengths(name: str, events: list[Event] | None = None) -> list[int]:
        source = open_importer(SourceSettings(name=name), listener=(events if events is not None else []).append)
        try:
            return [each.length for batch in source.batches() for each in batch]
        finally:
            source.close()

    events: list[Event] = []
    assert lengths("hf://me/data/hopper.hdf5", events) == lengths(f"hdf5:{local}") == [4, 5]
    last = [event for event in events if isinstance(event, Progress)][-1]
    assert (last.done, last.total) == (local.stat().st_size, local.stat().st_size)
    assert downloads(hub) == ["hopper.hdf5"]
    assert lengths("hdf5:hf://datasets/me/data@main/hopper.hdf5") == [4, 5]
    assert lengths("hf://me/data/more") == [3, 3]
    assert lengths("hf://me/data/m*/b.parquet") == [3]
    assert lengths("d4rl:hf://me/data/hopper.hdf5") == [4, 5]
    with pytest.raises(InputMissing, match="nothing at 'hf://me/data/none'") as caught:
        lengths("hf://me/data/none")
    assert caught.value.hint == "the repository has: README.md, hopper.hdf5, more"


def test_a_dataset_is_named_after_its_repository(hub: Hub, tmp_path: Path) -> None:
    offer(tmp_path, "hopper")
    address = HubAddress.parse("hf://me/hopper", kind="datasets")
    assert Path(address.fetch()).name == "hopper"


def test_a_warm_start_remembers_the_commit(hub: Hub, tmp_path: Path) -> None:
    commit = hub.commit("models", "me/tmaze")
    pinned = f"{POLICY}@{commit}"
    assert PolicySource(POLICY).pin(None) == pinned
    assert PolicySource(f"{POLICY}@main").pin(None) == pinned
    (tmp_path / "site/models/me/tmaze/main/notes.txt").write_text("moved on")
    another_process()
    stored = {"init": {"source": pinned}}
    assert PolicySource(POLICY).pin(stored) == pinned
    assert PolicySource(pinned).is_stored(stored)
    assert not PolicySource(f"{POLICY}/deep").is_stored(stored)
    assert not PolicySource("hf://me/other").is_stored(stored)
    assert PolicySource(POLICY).pin(None) != pinned


@pytest.mark.system
def test_commands_take_policies_and_datasets_of_the_hub(hub: Hub, tmp_path: Path, amago: Amago) -> None:
    scores = [amago("evaluate", name, "--episodes", 4, "--output", "json") for name in (POLICY, "zoo:tmaze")]
    assert [done.code for done in scores] == [0, 0], scores[0].err
    assert scores[0].json["metrics"]["return_mean"] == scores[1].json["metrics"]["return_mean"]
    assert amago("verify", POLICY).code == 0
    assert amago("collect", "--env", "tmaze", "--policy", POLICY, "--steps", 40, "--run", "played", "-q").code == 0
    done = amago("train", "--from-lake", "played", "--run", "warm", "--init", POLICY, "--steps", 1, "-q")
    assert done.code == 0, done.err
    assert f'source = "{POLICY}@{hub.commit("models", "me/tmaze")}"' in Path("warm/config.toml").read_text()
    weights = json.loads(Path("warm/run.json").read_text())
    assert load_trained("zoo:tmaze").identity in json.dumps(weights)
    again = amago("train", "--from-lake", "played", "--run", "warm", "--init", POLICY, "--steps", 2, "-q")
    assert again.code == 0, again.err
    offer(tmp_path, "data")
    done = amago("collect", "--from", "hf://me/data/hopper.hdf5", "--run", "own", "--output", "json")
    assert done.code == 0, done.err
    assert done.json["metrics"]["trajectories"] == 2


@pytest.mark.system
def test_a_policy_is_uploaded_and_comes_back(hub: Hub, amago: Amago, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "hf://me/new@main/best"
    refused = amago("export", "zoo:tmaze", "--to", place)
    assert refused.code == 3
    assert f"cannot upload to '{place}'" in " ".join(refused.err.split())
    monkeypatch.setenv("HF_TOKEN", hub.token)
    shown = amago("export", "zoo:tmaze", "--to", place, "--dry-run")
    assert f"export would write bundle: {place}" in shown.out
    done = amago("export", "zoo:tmaze", "--card", "--to", place, "--output", "json")
    assert done.code == 0, done.err
    assert done.json["outputs"] == [place]
    another_process()
    found, wanted = find_bundle(place), locate_in_zoo("zoo:tmaze")
    assert found is not None
    assert load_trained(place).checkpoint.update == load_trained("zoo:tmaze").checkpoint.update
    assert (found / "weights.safetensors").read_bytes() == (wanted / "weights.safetensors").read_bytes()
    assert "# new" in (found / "README.md").read_text()
    assert amago("export", "zoo:tmaze", "--format", "parquet", "--to", "hf://me/data").code == 2
