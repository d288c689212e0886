"""collect --from, as a stage: what is in the lake afterwards, whatever happened in between."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pipelines.config.settings import Settings
from pipelines.errors import AmagoError, InputMissing, IntegrityError, Interrupted, UsageError
from pipelines.events import Event, Progress
from pipelines.formats.flat import reader as d4rl
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.stages import ingest
from pipelines.stages.result import Result
from tests.formats.d4rl_data import flat, without, write
from tests.lake.factories import fill

LENGTHS = [5, 1, 7, 3, 30, 1, 2, 9]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "set.hdf5", flat(LENGTHS))


def take(path: Path | str, lake: Path, *, fresh: bool = False, listener: object = None, **settings: object) -> Result:
    name = path if isinstance(path, str) else f"d4rl:{path}"
    document = Settings.model_validate({"source": {"name": name, **settings}})
    more = {} if listener is None else {"listener": listener}
    return ingest.run(document, lake=lake, fresh=fresh, **more)  # type: ignore[arg-type]


def numbers(lake: Path) -> list[int]:
    sql = "select map_extract(tags, 'episode')[1]::int from trajectories order by all"
    return [number for (number,) in query(Lake(lake), sql)[1]]


def content(folder: Path) -> dict[str, str]:
    """Files of a lake, but for the index, that say what is in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "duckdb" not in path.name and not path.name.endswith(".lock")
    }


def test_all_of_it_once(file: Path, tmp_path: Path) -> None:
    done = take(file, tmp_path / "lake")
    assert (done.metrics["trajectories"], done.metrics["steps"]) == (8, 58)
    again = take(file, tmp_path / "lake")
    assert (again.status, again.metrics["trajectories"], again.metrics["steps_total"]) == ("skipped", 0, 58)
    assert numbers(tmp_path / "lake") == list(range(8))
    wanted = flat(LENGTHS)["rewards"].sum(dtype=np.float64)
    ((total, env, collector),) = query(
        Lake(tmp_path / "lake"), "select sum(return), any_value(env), any_value(collector) from trajectories"
    )[1]
    assert total == pytest.approx(wanted, rel=1e-5)
    assert (env, collector.startswith("set-")) == ("set", True)


def test_a_moved_file_is_still_the_same(file: Path, tmp_path: Path) -> None:
    take(file, tmp_path / "lake")
    (tmp_path / "elsewhere").mkdir()
    moved = file.rename(tmp_path / "elsewhere" / file.name)
    assert take(moved, tmp_path / "lake").status == "skipped"


@pytest.mark.system
def test_so_many_steps_and_then_more(file: Path, tmp_path: Path) -> None:
    some = take(file, tmp_path / "lake", steps=10)
    assert (some.metrics["trajectories"], some.metrics["steps"]) == (3, 13)
    assert take(file, tmp_path / "lake", steps=13).status == "skipped"
    assert take(file, tmp_path / "lake").metrics["trajectories"] == 5
    assert numbers(tmp_path / "lake") == list(range(8))


@pytest.mark.system
def test_an_interruption_goes_on(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(d4rl, "BATCH_BYTES", 200)

    def stop(event: Event) -> None:
        if isinstance(event, Progress) and event.stage == "collect":
            raise Interrupted("stop")

    for _ in range(3):
        with pytest.raises(Interrupted):
            take(file, tmp_path / "lake", listener=stop)
    before = numbers(tmp_path / "lake")
    assert 2 < len(before) < 8
    take(file, tmp_path / "lake")
    assert numbers(tmp_path / "lake") == list(range(8))


@pytest.mark.system
def test_what_has_expired_does_not_come_again(file: Path, tmp_path: Path) -> None:
    take(file, tmp_path / "lake", steps=16)  # four trajectories, in a segment of their own
    expire(Lake(tmp_path / "lake"), RetentionLimits(where="length > 0"), grace_seconds=0.0)
    assert take(file, tmp_path / "lake").metrics["trajectories"] == 4
    assert numbers(tmp_path / "lake") == [4, 5, 6, 7]


def test_a_changed_file_is_refused_unless_it_is_to_be_taken_anew(file: Path, tmp_path: Path) -> None:
    take(file, tmp_path / "lake", steps=10)
    write(file, flat(LENGTHS, seed=1))
    with pytest.raises(InputMissing, match=r"has changed since.*--fresh"):
        take(file, tmp_path / "lake")
    assert take(file, tmp_path / "lake", fresh=True).metrics["trajectories"] == 8


@pytest.mark.system
def test_a_run_remembers_its_source(file: Path, tmp_path: Path) -> None:
    settings = Settings.model_validate({"source": {"name": f"d4rl:{file}", "steps": 10}})
    run = tmp_path / "run"
    assert ingest.run(settings, run=run).metrics["trajectories"] == 3
    other = write(tmp_path / "other.hdf5", flat([4, 4], seed=3))
    with pytest.raises(UsageError, match="differs from that of its last collect") as refused:
        ingest.run(Settings.model_validate({"source": {"name": f"d4rl:{other}"}}), run=run)
    assert "source.name" in refused.value.problems[0]
    more = Settings.model_validate({"source": {"name": f"d4rl:{file}"}})
    assert ingest.run(more, run=run).metrics["steps_total"] == 58
    assert ingest.run(more, run=run, fresh=True).metrics["trajectories"] == 8
    assert numbers(run) == list(range(8))


def _damage(name: str, path: Path) -> Path:
    data = flat(LENGTHS)
    if name == "a NaN at the end":
        data["observations"][-1, 0] = np.nan
    elif name == "an action out of range":
        data["actions"][-1] = 5
    elif name == "no rewards":
        data = without(data, "rewards")
    elif name == "other spaces":
        data = flat(LENGTHS, size=9)
    write(path, data, compression="gzip")
    if name == "cut in half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


@pytest.mark.parametrize(
    ("name", "error", "code"),
    [
        ("a NaN at the end", IntegrityError, 4),
        ("an action out of range", InputMissing, 3),
        ("no rewards", InputMissing, 3),
        ("other spaces", InputMissing, 3),
        ("cut in half", IntegrityError, 4),
    ],
)
@pytest.mark.parametrize("filled", [True, False])
def test_what_is_bad_leaves_the_lake_as_it_was(
    file: Path,
    tmp_path: Path,
    name: str,
    error: type[AmagoError],
    code: int,
    filled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(d4rl, "BATCH_BYTES", 200)
    if filled:
        take(file, tmp_path / "lake")
    elif name == "other spaces":
        fill(Lake.create(tmp_path / "lake"), [3])
    before = content(tmp_path / "lake")
    with pytest.raises(error) as refused:
        take(_damage(name, tmp_path / "bad.hdf5"), tmp_path / "lake")
    assert refused.value.exit_code == code
    assert content(tmp_path / "lake") == before


def test_the_environment_is_named_and_fits(tmp_path: Path) -> None:
    path = write(tmp_path / "set.hdf5", flat([4, 5], size=3, actions=1))
    document = {"source": {"name": f"d4rl:{path}", "action_low": -2.0}, "env": {"name": "gym:Pendulum-v1"}}
    ingest.run(Settings.model_validate(document), lake=tmp_path / "lake")
    assert query(Lake(tmp_path / "lake"), "select distinct env from trajectories")[1] == [("gym:Pendulum-v1",)]
    action = Lake(tmp_path / "lake").only_schema().spaces.action
    assert action.high == (2.0,)
    ((mean,),) = query(Lake(tmp_path / "lake"), "select avg(abs(action[1])) from steps")[1]
    assert mean == pytest.approx(np.abs(flat([4, 5], size=3, actions=1)["actions"]).sum() / 2 / 11, rel=1e-5)


_TAKE = """
import sys
from pipelines.config.settings import Settings
from pipelines.lake.writer import Writer
from pipelines.formats.flat import reader as d4rl
from pipelines.stages import ingest
d4rl.BATCH_BYTES = 20_000
append = Writer.append_many
def acknowledged(self, trajectories):
    uids = append(self, trajectories)
    print("\\n".join(uids), flush=True)
    return uids
Writer.append_many = acknowledged
settings = {"source": {"name": sys.argv[1]}, "collect": {"seal_seconds": 0.05}}
ingest.run(Settings.model_validate(settings), lake=sys.argv[2])
"""


@pytest.mark.slow
def test_kill_9_again_and_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, 4000).tolist()
    path, lake, acknowledged = write(tmp_path / "set.hdf5", flat(lengths)), tmp_path / "lake", []
    root = Path(__file__).parents[2]
    for _ in range(6):
        command = [sys.executable, "-c", _TAKE, f"d4rl:{path}", str(lake)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(int(rng.integers(1, 400)))]
        time.sleep(float(rng.random()) * 0.05)
        process.kill()
        lines += [line.strip() for line in process.stdout if line.endswith("\n")]
        process.wait()
        acknowledged += [line for line in lines if line]
    take(path, lake)
    found = [uid for (uid,) in query(Lake(lake), "select uid from trajectories")[1]]
    assert len(set(acknowledged)) == len(acknowledged) > 1000
    assert set(acknowledged) <= set(found)
    assert numbers(lake) == list(range(4000))
    assert not verify(Lake(lake)).corrupt


@pytest.mark.parametrize("check", [True, False])
def test_a_source_without_a_usable_step_is_refused(tmp_path: Path, check: bool) -> None:
    data = without(flat([1, 1], terminal={0: False, 1: False}), "next_observations")
    with pytest.raises(InputMissing, match="none of its 2 trajectories has a usable step"):
        take(write(tmp_path / "x.hdf5", data), tmp_path / "lake", check=check)
    assert not (tmp_path / "lake").exists()
