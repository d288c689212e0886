"""The CRC32 of bytes laid together, from those of the parts: what has a checksum is not read again."""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # of CRC32, lowest power in the highest bit, as all numbers here


def combined(first: int, second: int, length: int) -> int:
    """CRC32 of two byte strings one after the other; `length` is that of the second."""
    return _product(_power(length), first) ^ second


def _product(a: int, b: int) -> int:
    """Product of two polynomials over GF(2), modulo CRC32's."""
    product, bit = 0, 1 << 31
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(1024)
def _power(length: int) -> int:
    """x to the power of 8 * `length`: what `length` more bytes do to a checksum."""
    power, place = 1 << 31, 3
    while length:
        if length & 1:
            power = _product(_square(place), power)
        length >>= 1
        place += 1
    return power


@lru_cache
def _square(place: int) -> int:
    """x squared `place` times."""
    return _product(_square(place - 1), _square(place - 1)) if place else 1 << 30
