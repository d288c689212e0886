from pathlib import Path

import numpy as np

from pipelines.lake.blob import BlobCache


def test_the_cache_keeps_what_was_used_last_within_its_bytes() -> None:
    decoded: list[int] = []

    def batch(number: int):
        def decode():
            decoded.append(number)
            return {"x": np.full(10, number, np.uint8)}

        return cache.get((Path("f"), number), decode)["x"][0]

    cache = BlobCache(limit_bytes=25)
    assert [batch(n) for n in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert decoded == [1, 2, 3, 2]  # 3 pushed 2 out, not 1


def test_one_batch_larger_than_the_cache_is_still_given() -> None:
    cache = BlobCache(limit_bytes=1)
    assert cache.get((Path("f"), 0), lambda: {"x": np.zeros(100)})["x"].size == 100
