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
