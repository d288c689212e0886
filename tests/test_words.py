"""The field's words: terms that were replaced do not come back, in code, messages, help or documentation."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# What to write instead: a pattern of what not to write.
TERMS = {
    "evaluate, critic output, policy values": r"\b[Jj]udge[sd]?\b|\b[Jj]udging\b|\bverdicts?\b",
    "ChainRunner, EpisodeQueue, FinishedEpisodes, EpisodeStats, AttentionWindow, RetentionThread, or another noun": (
        r"^class _?(Workshop|Outbox|Ended|Tally|Sight|Cap|Hidden|Swept|Going|Gone|Laid|Drawn|Told|Own|Judged)\b"
    ),
    "valid steps": r"\breal steps?\b",
    "scaled rewards, reward scale": r"(?<!\")(?<!Agent\.)\breward_multiplier\b|\bmultiplied rewards\b",
    "acting discount": r"\bdiscount that acts\b",
    "auxiliary losses": r"\b[Ee]xtra_?loss(es)?\b|\bExtraLoss|\bextra losses\b",
    "actor loss": r"\b[Mm]aximisation (loss|term)\b",
    "behaviour cloning": r"\b[Ii]mitation (loss|term)\b",
    "context_length": r"\btrain\.window\b",
    "grad_accumulation, activation_checkpointing": r"\btrain\.(accumulate|recompute)\b",
    "ema_decay": r"\btrain\.average\b",
    "n_step": r"\bagent\.num_steps\b",
    "per_alpha": r"\btrain\.priority\b",
    "label smoothing": r"\bsoften(ed|s|ing)?\b",
    "action mask": r"\blegal[_ ]actions?\b",
    "effective horizon": r"\bhorizon_G\b",
    "observation, action, termination, split": r"\*\*(Seen|Done|Ends)\b|\| seen \| done \|",
    "again": r"\banew\b",
    "about three minutes": r"\bsome (two|three|four|five|ten|twenty|thirty|forty|fifty|hundred)\b",
    "is not a": r"(?<![Tt]here )\bis no (?!longer\b|more\b|less\b|better\b|worse\b|different\b)[a-z]+",
    "is stored, is in": r"\b(it|that|which|file|files|lake|run|index|they) lies? (in|on|at|beside|under)\b",
    "report, say, log": r"\b[Tt]old\b|(?<!_study\.)\b_?[Tt]ell(s|ing)?\b",
    "all readers, any process": r"\b[Nn]obody is asked\b|\b[Ww]hoever\b",
}
# Names of files that hold what they hold under another name now.
MODULES = {"deriving", "originals", "own", "kinds", "needs", "versions", "workshop", "utils", "helpers", "common"}


@functools.cache
def texts() -> dict[Path, str]:
    """Return the files that are held to the words: packages, recipes, documentation of today."""
    code = [path for package in ("pipelines", "amago_cli") for path in (ROOT / package).rglob("*.py")]
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples.toml")]
    found = sorted([*code, *pages, *(ROOT / "docs").glob("*.md"), *(ROOT / "pipelines").rglob("*.toml")])
    return {path: path.read_text(encoding="utf-8") for path in found}


@pytest.mark.parametrize("better", TERMS)
def test_a_replaced_term_does_not_come_back(better: str) -> None:
    pattern = re.compile(TERMS[better], re.MULTILINE)
    found = {
        path.relative_to(ROOT).as_posix(): match[0] for path, text in texts().items() if (match := pattern.search(text))
    }
    assert not found, f"write {better!r}"


def test_a_module_is_not_named_by_a_replaced_term() -> None:
    names = {path.stem for package in ("pipelines", "amago_cli") for path in (ROOT / package).rglob("*.py")}
    assert not names & MODULES


def test_terms_are_found_where_they_are_used() -> None:
    pattern = re.compile(TERMS["is not a"])
    assert pattern.search("it is no lake")
    assert not pattern.search("it is no longer there")
    assert re.search(TERMS["again"], "built anew")
