"""A reader of lakes that knows docs/architecture.md, pyarrow and JSON only."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa


def read_log(lake: Path) -> dict[str, Any]:
    """Fold the entries of the log."""
    added: set[str] = set()
    moved: dict[str, str] = {}
    expired: set[str] = set()
    dead: dict[str, set[str]] = {}
    damaged: dict[str, Any] = {}
    for path in sorted((lake / "log").glob("*.json")):
        file = json.loads(path.read_text())
        if file["restart"]:
            added, moved, expired, dead, damaged = set(), {}, set(), {}, {}
        for entry in file["entries"]:
            moved |= entry.get("moved", {})
            added |= {*entry.get("added", ()), *entry.get("moved", {}).values()}
            expired |= {*entry.get("segments", ())}
            for id, uids in entry.get("trajectories", {}).items():
                dead.setdefault(id, set()).update(uids)
            damaged |= entry.get("quarantine", {})
    quarantined = {id for id, damage in damaged.items() if damage is not None}
    return {"added": added, "moved": moved, "expired": expired, "dead": dead, "quarantined": quarantined}


def read_trajectories(path: Path) -> pa.Table:
    """Return the table of trajectories in a segment's footer."""
    with pa.OSFile(str(path)) as file:
        footer = pa.ipc.open_file(file).metadata
    size = json.loads(footer[b"amago"])["trajectories_bytes"]
    return pa.ipc.open_stream(pa.decompress(base64.b64decode(footer[b"trajectories"]), size, "zstd")).read_all()


def count(lake: Path) -> dict[str, int]:
    """Return the live trajectories of a lake by uid, with their numbers of rows."""
    log, own = read_log(lake), f"-compact.{json.loads((lake / 'lake.json').read_text())['id'][:8]}."

    def counts(id: str) -> bool:
        if id in log["expired"] or id in log["quarantined"] or (own in id and id not in log["added"]):
            return False
        while id in log["moved"]:
            id = log["moved"][id]
            if id not in log["quarantined"]:
                return False
        return True

    rows: dict[str, int] = {}
    bases: dict[str, str] = {}
    for path in sorted((lake / "segments").glob("*/*.arrow")):
        id = f"{path.parent.name}/{path.name.removesuffix('.arrow')}"
        if path.name.endswith(".blob.arrow") or not counts(id):
            continue
        for row in read_trajectories(path).to_pylist():
            uid = row["uid"].hex()
            if uid not in log["dead"].get(id, ()):
                rows[uid] = row["length"] + 1
                if row["base_uid"]:
                    bases[uid] = row["base_uid"].hex()
    return {uid: number for uid, number in rows.items() if uid not in bases or bases[uid] in rows}
