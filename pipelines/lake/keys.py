"""Names of things in a lake. A segment's id is "FOLDER/STEM", "FOLDER/STEM.ovl" for an overlay."""

from __future__ import annotations

REWRITTEN = "compact"  # label of the writers that make segments from others


def segment_key(id: str) -> str:
    """Where the columns of a segment lie."""
    return f"segments/{id}.arrow"


def blob_key(id: str) -> str:
    """Where the wide columns of a segment lie."""
    return f"segments/{id}.blob.arrow"


def is_rewritten(id: str) -> bool:
    """Whether a segment may have been made from others: its footer says which."""
    return f"-{REWRITTEN}." in id


def written_by(id: str) -> tuple[str, int, bool]:
    """What a segment's name says of it: its writer, the writer's count, and whether it is an overlay.

    >>> written_by("2026010203/0006476bd2f0e2d6-actor.1f.9c0d-00000007.ovl")
    ('actor.1f.9c0d', 7, True)
    """
    name = id.rpartition("/")[2]
    writer, _, sequence = name.removesuffix(".ovl").partition("-")[2].rpartition("-")
    return writer, int(sequence) if sequence.isdecimal() else -1, name.endswith(".ovl")
