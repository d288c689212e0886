"""A small lake of the current format, in which everything has happened once.

`python -m tests.lake.golden` makes it again, which is due after a change of the format only: its number in
`pipelines.lake.store` grows, and earlier lakes are refused.
"""

from pathlib import Path

LAKE = Path(__file__).parent / "lake"
EXPECTED = Path(__file__).parent / "expected.json"
