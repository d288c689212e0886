"""Untrusted text on a terminal: characters that move the cursor, hide or reorder text are shown as escapes."""

from __future__ import annotations

import re

# C0 (but tab and newline), DEL, C1, line and paragraph separators, marks and overrides of direction, lone surrogates.
_CONTROLS = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ud800-\udfff"
)
_IN_A_TEXT = re.compile(f"[{_CONTROLS}]")
_IN_A_LINE = re.compile(f"[\t\n{_CONTROLS}]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def line(text: str) -> str:
    """Escape `text` as part of one line.

    >>> line("a\\x1b[31m\\nb")
    'a\\\\u001b[31m\\\\nb'
    """
    return text if text.isprintable() else _IN_A_LINE.sub(_escape, text)


def lines(text: str) -> str:
    """Escape `text`, keeping its newlines and tabs."""
    return text if text.isprintable() else _IN_A_TEXT.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return _SHORT.get(found[0], f"\\u{ord(found[0]):04x}")
