import zlib

from hypothesis import given
from hypothesis import strategies as st

from pipelines.lake.crc import combined


@given(first=st.binary(max_size=300), second=st.binary(max_size=5000) | st.integers(0, 1 << 22).map(bytes))
def test_equals_the_checksum_of_both_read_at_once(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
