"""Removal in trees of runs, lakes and links: whatever is there, one run goes, or nothing does."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.errors import UsageError
from pipelines.runs.removal import remove
from tests.runs.factory import make_run
from tests.tiers import examples

NAMES = ("a", "b", "c")
PLACES = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join)


@dataclass
class Tree:
    """Runs and lakes by their place below runs/, links with their targets, and what settings of runs name."""

    runs: dict[str, str] = field(default_factory=dict)
    lakes: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)


TREES = st.builds(
    Tree,
    runs=st.dictionaries(PLACES, PLACES | st.just(""), min_size=1, max_size=6),
    lakes=st.lists(PLACES.map(lambda place: f"{place}/lake") | PLACES, max_size=4),
    links=st.dictionaries(PLACES, PLACES, max_size=4),
)


def build(tree: Tree) -> list[Path]:
    """Make the tree in the current directory, as far as its parts do not exclude each other; return the runs."""
    made = []
    for place, used in tree.runs.items():
        settings = {"train": {"lakes": [f"runs/{used}/lake"]}} if used else {}
        made.append(make_run(Path("runs") / place, settings=settings))
    for place in tree.lakes:
        path = Path("runs") / place
        path.mkdir(parents=True, exist_ok=True)
        (path / "lake.json").write_text(json.dumps({"id": f"id-of-{place}"}))
    for place, target in tree.links.items():
        path = Path("runs") / place
        if not os.path.lexists(path) and not any(parent.is_symlink() for parent in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(Path("runs").absolute() / target)
    return sorted(made)


def everything(root: Path) -> set[Path]:
    found = {root}
    if root.is_dir() and not root.is_symlink():
        for child in root.iterdir():
            found |= everything(child)
    return {each for each in found if each.suffix != ".lock"}


def in_the_way(target: Path, runs: list[Path]) -> bool:
    """Decide literally, from all that there is, whether a run may go."""
    real = target.resolve()
    whole = everything(Path("runs"))
    inside = [each for each in whole if each != target and each.is_relative_to(target)]
    if any(each.name == "config.toml" and each.parent != target for each in inside):
        return True
    if any(each.name == "lake.json" and each.parent not in (target / "lake", target / "offline") for each in inside):
        return True
    lakes = [each.parent for each in whole if each.name == "lake.json"]
    for run in runs:
        # What is in a lake is no run.
        if run.is_relative_to(target) or any(lake in run.parents for lake in lakes):
            continue
        text = (run / "config.toml").read_text()
        used = next((line.split('"')[1] for line in text.splitlines() if line.strip().startswith('"runs/')), "")
        if used and Path(os.path.realpath(used)).is_relative_to(real):
            return True
        for each in whole - set(inside):
            near = each.is_relative_to(run) and not any(
                each.is_relative_to(lake) for lake in lakes if lake != each.parent
            )
            if near and each.is_symlink() and Path(os.path.realpath(each)).is_relative_to(real):
                return True
    return False


@pytest.mark.system
@examples(300)
@given(TREES, st.data())
def test_a_run_goes_alone_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, tree: Tree, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("tree")
        patch.chdir(home)
        runs = build(tree)
        target = data.draw(st.sampled_from(runs))
        before, seen = everything(Path("runs")), list[Path]()
        needed = in_the_way(target, runs)
        scan = os.scandir

        def watched(path: str | Path | int) -> object:
            if not isinstance(path, int):  # shutil.rmtree's, of a directory that it has opened
                seen.append(Path(os.path.realpath(path)))
            return scan(path)

        patch.setattr(os, "scandir", watched)
        refused = None
        try:
            remove([target])
        except UsageError as error:
            refused = error
        patch.setattr(os, "scandir", scan)
        assert (refused is not None) == needed, refused
        left = before if needed else {each for each in before if not each.is_relative_to(target)}
        assert everything(Path("runs")) == left
        assert all(each.is_relative_to(home / "runs") for each in seen)
