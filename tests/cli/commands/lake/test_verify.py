from __future__ import annotations

from pathlib import Path

from pipelines.lake.reading import trajectories
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.cli.conftest import Amago


def test_a_sound_lake(amago: Amago, small: Path) -> None:
    done = amago("lake", "verify", small, "--output", "json")
    assert done.code == 0
    assert done.json["metrics"]["segments_checked"] >= 1
    assert done.json["metrics"]["corrupt"] == []


def test_a_flipped_byte_is_exit_4_and_names_the_segment(amago: Amago, small: Path) -> None:
    segment = next((small / "lake" / "segments").rglob("*.arrow"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 3] ^= 0xFF
    segment.write_bytes(data)
    failed = amago("lake", "verify", small, "--output", "json")
    assert failed.code == 4
    assert len(failed.json["metrics"]["corrupt"]) == 1
    assert segment.stem in failed.json["metrics"]["corrupt"][0]
    assert "Traceback" not in failed.err


def test_a_truncated_segment_is_found(amago: Amago, small: Path) -> None:
    segment = next((small / "lake" / "segments").rglob("*.arrow"))
    segment.write_bytes(segment.read_bytes()[:-100])
    failed = amago("lake", "verify", small)
    assert failed.code == 4
    assert "Traceback" not in failed.err


def test_what_a_dead_collector_logged_is_sealed_and_counted(amago: Amago, small: Path) -> None:
    lake = Lake(small)
    writer = lake.writer(lake.only_schema())
    writer.append(next(trajectories(lake)).columns, TrajectoryInfo(env="gym:CartPole-v1"))
    before = amago("lake", "verify", small, "--output", "json").json["metrics"]["trajectories"]
    writer._abandon()
    assert amago("lake", "verify", small, "--output", "json").json["metrics"]["trajectories"] == before + 1


def test_a_file_that_no_lake_wrote_is_shown(amago: Amago, small: Path) -> None:
    (small / "lake" / "segments" / "notes.txt").write_text("mine")
    assert amago("lake", "verify", small, "--output", "json").json["metrics"]["foreign"] == [
        "small/lake/segments/notes.txt"
    ]
    assert "notes.txt" in amago("lake", "verify", small).out


def test_damaged_log_is_exit_4_and_repair_restarts_it(amago: Amago, small: Path) -> None:
    question = ("lake", "sql", small, "select count(*) as n from trajectories", "--output", "json")
    before = amago(*question).json[0]["n"]
    assert amago("lake", "expire", small, "--max-trajectories", 1).code == 0
    (entry,) = (small / "lake" / "log").iterdir()
    entry.write_bytes(entry.read_bytes()[:-20])
    failed = amago("lake", "verify", small, "--output", "json")
    assert failed.code == 4
    assert len(failed.json["metrics"]["damaged_log"]) == 1
    assert "--repair restarts the log" in failed.err
    assert amago("lake", "expire", small, "--max-trajectories", 1).code == 4
    assert amago("lake", "verify", small, "--repair").code == 0
    assert amago("lake", "verify", small).code == 0
    assert amago(*question).json[0]["n"] == before
    assert amago("lake", "expire", small, "--max-trajectories", 1).code == 0
    assert amago(*question).json[0]["n"] == 1


def test_repair_saves_what_is_whole_and_is_exit_4_for_what_is_lost(amago: Amago, small: Path) -> None:
    segment = next((small / "lake" / "segments").rglob("*.arrow"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 3] ^= 0xFF
    segment.write_bytes(data)
    before = amago("lake", "sql", small, "select count(*) as n from trajectories", "--output", "json").json[0]["n"]
    failed = amago("lake", "verify", small, "--repair", "--output", "json")
    assert failed.code == 4
    (lost,) = failed.json["metrics"]["lost"]
    (repaired,) = failed.json["metrics"]["repaired"]
    assert repaired["segment"] in failed.json["metrics"]["corrupt"]
    assert repaired["into"] is not None
    uids = [row["uid"] for row in amago("lake", "sql", small, "select uid from trajectories", "--output", "json").json]
    assert len(uids) == before - 1
    assert lost not in uids
    assert amago("lake", "verify", small, "--repair").code == 0


def test_repair_without_loss_is_exit_0(amago: Amago, small: Path) -> None:
    amago("lake", "info", small)
    segment = next((small / "lake" / "segments").rglob("*.arrow"))
    data = segment.read_bytes()
    segment.write_bytes(data[:-200] + bytes(200))
    done = amago("lake", "verify", small, "--repair", "--output", "json")
    assert done.code == 0, done.err
    assert len(done.json["metrics"]["corrupt"]) == 1
    assert amago("lake", "verify", small).code == 0


def test_a_log_that_cannot_be_read_whole_is_exit_4_until_it_is_removed(amago: Amago, small: Path) -> None:
    """Records of a crashed collector are lost, whichever command sealed the rest first."""
    lake = Lake(small)
    writer = lake.writer(lake.only_schema())
    for trajectory in list(trajectories(lake))[:3]:
        writer.append(trajectory.columns, TrajectoryInfo(env="x"))
    writer._abandon()
    (log,) = (small / "lake" / "wal").glob("*.wal")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 0xFF
    log.write_bytes(content)
    assert amago("lake", "reindex", small).code == 0
    for _ in range(2):
        failed = amago("lake", "verify", small, "--output", "json")
        assert failed.code == 4, failed.err
        assert failed.json["metrics"]["damaged_logs"] == [str(small / "lake" / "quarantine" / log.name)]
    (small / "lake" / "quarantine" / log.name).unlink()
    assert amago("lake", "verify", small).code == 0
