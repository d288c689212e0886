"""Small lakes of the current format, in each of which everything has happened once that existed when it was made.

`python -m tests.lake.golden` adds one, which is due when a lake can hold something new. After a change of the format,
whose number in `pipelines.lake.store` grows, earlier lakes are refused, and the first of the new format replaces them.
"""

from pathlib import Path

LAKES = Path(__file__).parent / "lakes"
NUMBERS = sorted(int(path.name) for path in LAKES.iterdir())
EXPECTED = "expected.json"
