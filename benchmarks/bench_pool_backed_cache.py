"""PoolBackedKVCache in one-token steps to 4,096 tokens, against mlx-lm's own KVCache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
from harness import OURS, Task, main
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.memory.pool_backed_cache import build_pooled_caches
from mlx_lm.models.cache import KVCache

LAYERS = 32
HEADS = 8
DIMS = 128
TOKENS = 4_096


class Model:
    """As much of a model as build_pooled_caches looks at."""

    layers = (None,) * LAYERS


def stock() -> list[KVCache]:
    return [KVCache() for _ in range(LAYERS)]


def pooled(step: int | None = None) -> list[Any]:
    pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=2 * LAYERS * 1024))
    return build_pooled_caches(Model(), pool, owner=1, step=step)


def step_times(caches: Sequence[Any]) -> list[float]:
    """Seconds of each step: one token in every layer, evaluated together."""
    shape = (1, HEADS, 1, DIMS)
    new = [mx.random.normal(shape).astype(mx.float16) for _ in range(2 * LAYERS)]
    mx.eval(new)
    pairs = list(zip(new[::2], new[1::2], strict=True))
    times = []
    for _ in range(TOKENS):
        start = perf_counter()
        fetched = [
            cache.update_and_fetch(keys, values)
            for cache, (keys, values) in zip(caches, pairs, strict=True)
        ]
        mx.eval(fetched)
        del fetched
        times.append(perf_counter() - start)
    mx.clear_cache()
    return times


def mean_per_layer(make: Callable[[], Sequence[Any]]) -> float:
    return sum(step_times(make())) / TOKENS / LAYERS


def worst_step(make: Callable[[], Sequence[Any]]) -> float:
    return max(step_times(make()))


def tasks() -> list[Task]:
    contestants = {OURS: pooled, "stock": stock}
    exact = {OURS: lambda: pooled(256), "stock": stock}
    return [
        Task(
            "mean step, a layer",
            "us",
            {name: lambda make=make: mean_per_layer(make) for name, make in contestants.items()},
            reach=1 / 0.75,
        ),
        Task(
            "worst step, all layers",
            "ms",
            {name: lambda make=make: worst_step(make) for name, make in contestants.items()},
            reach=1.0,
        ),
        Task(
            "mean step, a layer, step=256",
            "us",
            {name: lambda make=make: mean_per_layer(make) for name, make in exact.items()},
        ),
    ]


if __name__ == "__main__":
    main("PoolBackedKVCache, 32 layers to 4,096 tokens, 8 heads of 128, fp16", tasks)
