"""Quantised caches: attend and append, against exact attention by numpy and the published package.

OPENBLAS_NUM_THREADS=1 python benchmarks/bench_methods.py --cores 0
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import peer
from harness import OURS, Task, main, numpy_attention, repeated
from kvpool.cache import METHODS, KVCacheConfig, KVCacheFactory

HEAD_DIM = 128
BITS = 2
FEW = 512
MANY = 4096
# The published package takes milliseconds a call.
CALLS = 50
PEER_CALLS = 3
PEER_APPENDS = 256
ATTEND_US = 40.0
# At 4,096 tokens: no more than 2.5 times what exact attention by numpy takes on one core.
NUMPY_SHARE = 1 / 2.5
APPEND_US = {"kivi": 5.0}
OTHER_APPEND_US = 15.0


class Peer:
    """The published package's cache of a method; None where it has none that attends."""

    def __init__(self) -> None:
        peer.install()
        import mlx.core as mx
        import veloxquant_mlx

        self.mx, self.package = mx, veloxquant_mlx

    def cache(self, method: str) -> Any:
        builder = self.package.KVCacheBuilder().with_method(method).with_head_dim(HEAD_DIM)
        return builder.with_bit_width(BITS).build()

    def rows(self, rows: np.ndarray) -> list[Any]:
        arrays = [self.mx.array(row.astype(np.float16)) for row in rows]
        self.mx.eval(arrays)
        return arrays

    def append(self, cache: Any, keys: list[Any], values: list[Any]) -> None:
        """With what it puts off until the next attend."""
        for k, v in zip(keys, values, strict=True):
            cache.append_key(k)
            cache.append_value(v)
        self.mx.eval(cache.attend(keys[0]))


def filled(method: str, keys: np.ndarray, values: np.ndarray) -> Any:
    cache = KVCacheFactory.create(KVCacheConfig(method=method, bit_width_inlier=BITS))
    cache.append(keys[None], values[None])
    return cache


def tasks() -> Sequence[Task]:
    random = np.random.default_rng(0)
    keys, values = random.standard_normal((2, MANY, HEAD_DIM)).astype(np.float32)
    q = random.standard_normal(HEAD_DIM).astype(np.float32)
    published = Peer()
    peer_rows = published.rows(keys[:FEW]), published.rows(values[:FEW])
    peer_query = published.rows(q[None])[0]
    made = []
    for method in METHODS:
        has_peer = method != "kivi"  # there it keeps fp16 and leaves attention to mlx-lm
        few = filled(method, keys[:FEW], values[:FEW])
        contestants = {
            OURS: repeated(lambda c=few: c.attend(q), CALLS),
            "numpy exact": repeated(lambda: numpy_attention(q, keys[:FEW], values[:FEW]), CALLS),
        }
        if has_peer:
            other = published.cache(method)
            published.append(other, *peer_rows)
            contestants[peer.NAME] = repeated(
                lambda c=other: published.mx.eval(c.attend(peer_query)), PEER_CALLS
            )
        made.append(
            Task(f"{method}: attend, {FEW} tokens", "us", contestants, reach_value=ATTEND_US)
        )
        many = filled(method, keys, values)
        made.append(
            Task(
                f"{method}: attend, {MANY} tokens",
                "us",
                {
                    OURS: repeated(lambda c=many: c.attend(q), CALLS),
                    "numpy exact": repeated(lambda: numpy_attention(q, keys, values), CALLS),
                },
                reach=NUMPY_SHARE,
            )
        )

        def append_pairs(method: str = method) -> float:
            cache = KVCacheFactory.create(KVCacheConfig(method=method, bit_width_inlier=BITS))
            start = perf_counter()
            for k, v in zip(keys[:FEW], values[:FEW], strict=True):
                cache.append_key(k)
                cache.append_value(v)
            return (perf_counter() - start) / FEW

        def append_pairs_there(method: str = method) -> float:
            cache = published.cache(method)
            k, v = (rows[:PEER_APPENDS] for rows in peer_rows)
            start = perf_counter()
            published.append(cache, k, v)
            return (perf_counter() - start) / PEER_APPENDS

        contestants = {OURS: append_pairs}
        if has_peer:
            contestants[peer.NAME] = append_pairs_there
        reach = APPEND_US.get(method, OTHER_APPEND_US)
        made.append(Task(f"{method}: append a pair", "us", contestants, reach_value=reach))
    return made


if __name__ == "__main__":
    main("Quantised caches, 2 bits, 128 numbers", tasks, repeats=5)
