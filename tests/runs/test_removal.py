from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipelines.config.run_directory import RunDirectory
from pipelines.errors import InputMissing, Locked, StageFailed, UsageError
from pipelines.runs.removal import find_dependents, find_prunable, remove
from tests.runs.factory import make_run


def test_a_run_is_removed_with_all_it_contains(tmp_path: Path) -> None:
    path = make_run(tmp_path / "runs" / "a", scores={10: 0.5})
    make_run(tmp_path / "runs" / "b")
    (removed,) = remove([path])
    assert removed.bytes > 0
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["b"]


def test_a_dry_run_removes_nothing(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a")
    before = sorted(path.rglob("*"))
    (removed,) = remove([path], dry_run=True)
    assert removed.bytes > 0
    assert [each for each in sorted(path.rglob("*")) if each.suffix != ".lock"] == before


def test_a_run_that_is_running_stays_and_so_do_the_others(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name) for name in ("a", "b")]
    with RunDirectory(paths[1]).lock("train"), pytest.raises(Locked):
        remove(paths)
    assert all(path.is_dir() for path in paths)


def test_directories_that_are_not_runs_are_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    run = make_run(runs / "a")
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.toml").write_text("x = 1")
    with pytest.raises(InputMissing):
        remove([runs])
    for place in (tmp_path / "link", tmp_path / "project"):
        with pytest.raises(UsageError):
            remove([place])
    nested = make_run(run / "nested")
    with pytest.raises(UsageError, match="contains other runs"):
        remove([run])
    monkeypatch.chdir(nested)
    with pytest.raises(UsageError, match="current directory"):
        remove([nested])
    assert nested.is_dir()


def test_links_inside_a_run_are_not_followed(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kept").write_text("")
    (path / "lake").symlink_to(tmp_path / "data")
    remove([path])
    assert (tmp_path / "data" / "kept").exists()


@pytest.mark.parametrize("inside", ["x/y/nested", ".hidden/nested", "lake/nested"])
def test_a_run_that_contains_another_at_any_depth_stays(tmp_path: Path, inside: str) -> None:
    run = make_run(tmp_path / "a")
    make_run(run / inside)
    with pytest.raises(UsageError, match=f"contains other runs, such as '{inside}'"):
        remove([run], force=True)
    assert (run / inside / "config.toml").is_file()


def test_a_run_that_contains_a_lake_beside_its_own_stays(tmp_path: Path) -> None:
    settings = {"source": {"name": "npz:x", "lake": "{run}/given"}}
    run = make_run(tmp_path / "a", settings=settings)
    for name in ("lake", "given"):
        (run / name).mkdir()
        (run / name / "lake.json").write_text("{}")
    assert len(remove([run], dry_run=True)) == 1
    (run / "x" / "mine").mkdir(parents=True)
    (run / "x" / "mine" / "lake.json").write_text("{}")
    with pytest.raises(UsageError, match="contains another lake, 'x/mine'"):
        remove([run], force=True)


def test_a_run_that_a_link_in_another_leads_to_stays(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "first"), make_run(tmp_path / "second")
    (second / "lake").symlink_to(first / "lake")
    with pytest.raises(UsageError, match="other runs depend"):
        remove([first])


def test_of_a_folder_for_everything_only_its_runs_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (
        make_run(tmp_path / "first"),
        make_run(tmp_path / "second", settings={"collect": {"policy": "first"}}),
    )
    make_run(tmp_path / "others" / "deep")
    tmp_path.chmod(0o1777)
    seen: list[Path] = []
    scan = os.scandir

    def watched(path: str | Path) -> object:
        seen.append(Path(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", watched)
    assert find_dependents([first]) == {first: [f"'{second}' acts with its policy"]}
    assert not [path for path in seen if "others" in path.parts]


def test_unreadable_directories_are_not_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc/1/fdinfo, in which even asking for a file fails."""
    first = make_run(tmp_path / "first")
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def refused(path: str | Path) -> object:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert find_dependents([first]) == {}
    (first / "closed").mkdir()
    with pytest.raises(StageFailed, match="cannot read"):
        remove([first])


def lake(run: Path, identity: str) -> Path:
    (run / "lake" / "collectors").mkdir(parents=True)
    (run / "lake" / "lake.json").write_text(json.dumps({"id": identity}))
    return run


def test_a_lake_that_another_run_trained_on_is_kept(tmp_path: Path) -> None:
    first = lake(make_run(tmp_path / "first"), "abc")
    second = make_run(tmp_path / "second")
    record = json.loads((second / "run.json").read_text())
    used = {"id": "abc", "lake": "elsewhere/first/lake", "weight": 1.0, "last": 1.0}
    (second / "run.json").write_text(json.dumps(record | {"lakes": [used]}))
    with pytest.raises(UsageError, match="other runs depend") as caught:
        remove([first])
    assert "second" in caught.value.problems[0]
    assert len(remove([first, second], dry_run=True)) == 2  # together they may go
    assert remove([first], force=True)[0].path == first


@pytest.mark.parametrize(
    "settings",
    [{"train": {"lakes": ["first/lake:0.5"]}}, {"collect": {"policy": "first@best"}}, {"collect": {"follow": "first"}}],
)
def test_runs_whose_settings_name_another_depend_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    first = make_run(Path("first"))
    make_run(Path("second"), settings=settings)
    make_run(Path("first-2"), settings={"train": {"lakes": ["first-2/lake"]}})
    assert list(find_dependents([first])) == [first]
    assert find_dependents([Path("first-2")]) == {}


def test_a_lake_that_another_run_fills_is_kept(tmp_path: Path) -> None:
    first, second = lake(make_run(tmp_path / "first"), "abc"), make_run(tmp_path / "second")
    for run in (first, second, tmp_path / "gone"):
        content = {"collector": run.name, "run": {"path": str(run), "absolute": str(run)}}
        (first / "lake" / "collectors" / f"{run.name}.json").write_text(json.dumps(content))
    assert find_dependents([first]) == {first: [f"'{second}' collects into its lake"]}


def test_the_best_of_each_environment_are_kept() -> None:
    rows = [
        {"run": name, "env": env, "state": state, "score": score, "standard": env}
        for name, env, state, score in [
            *(("a", "maze", "finished", 0.1), ("b", "maze", "finished", 0.9), ("c", "maze", "interrupted", 0.5)),
            *(("d", "lake", "finished", -5.0), ("e", "maze", "running", 0.0), ("f", "maze", "failed", None)),
            ("g", "maze", "interrupted", None),
        ]
    ]
    assert find_prunable(rows, keep_best=1) == [Path("a"), Path("c")]
    assert find_prunable(rows, keep_best=1, failed=True) == [Path("a"), Path("c"), Path("f")]
    assert find_prunable(rows, keep_best=3) == []


def test_a_kill_midway_leaves_nothing_that_looks_like_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(tmp_path / "a")

    def killed(place: Path) -> None:
        os.unlink(place / "run.json")
        raise KeyboardInterrupt

    monkeypatch.setattr("pipelines.runs.removal.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove([path])
    assert not path.exists()
    assert all(each.name.startswith(".") for each in tmp_path.iterdir())
