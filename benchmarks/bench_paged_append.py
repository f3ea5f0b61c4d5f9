"""Paged caches: one-token appends to 4,096 tokens and forks, against mlx-lm's own KVCache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
from harness import OURS, Task, main
from kvpool._mlx_module import extension
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from mlx_lm.models.cache import KVCache

LAYERS = 32
HEADS = 8
DIMS = 128
TOKENS = 4_096
FORKED = 1_000
FORKS = 20


class Paged:
    """A layer with the part of mlx-lm's interface that a step uses."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> mx.array:
        self.layer.update_and_fetch(keys, values)
        return self.layer.order


class Stock:
    def __init__(self) -> None:
        self.cache = KVCache()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self.cache.update_and_fetch(keys, values)


def paged_layers(pool: BlockPoolAllocator, owner: int = 1) -> list[Any]:
    group = extension.PagedGroup(pool, owner)
    return [extension.PagedLayer(group, HEADS, DIMS, DIMS) for _ in range(LAYERS)]


def make_pool() -> BlockPoolAllocator:
    n_blocks = 4 * LAYERS * TOKENS // 16
    return BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=n_blocks))


def paged() -> list[Paged]:
    return [Paged(layer) for layer in paged_layers(make_pool())]


def stock() -> list[Stock]:
    return [Stock() for _ in range(LAYERS)]


def rows(n: int) -> list[mx.array]:
    shape = (1, HEADS, n, DIMS)
    new = [mx.random.normal(shape).astype(mx.float16) for _ in range(2 * LAYERS)]
    mx.eval(new)
    return new


def step_times(caches: Sequence[Any]) -> list[float]:
    """Seconds of each step: one token in every layer, evaluated together."""
    new = rows(1)
    pairs = list(zip(new[::2], new[1::2], strict=True))
    times = []
    for _ in range(TOKENS):
        start = perf_counter()
        mx.eval(
            [
                cache.update_and_fetch(keys, values)
                for cache, (keys, values) in zip(caches, pairs, strict=True)
            ]
        )
        times.append(perf_counter() - start)
    mx.clear_cache()
    return times


def mean_per_layer(make: Callable[[], Sequence[Any]]) -> float:
    return sum(step_times(make())) / TOKENS / LAYERS


def worst_per_layer(make: Callable[[], Sequence[Any]]) -> float:
    return max(step_times(make())) / LAYERS


def fork_paged() -> float:
    pool = make_pool()
    layers = paged_layers(pool)
    new = rows(FORKED)
    for layer, keys, values in zip(layers, new[::2], new[1::2], strict=True):
        layer.update_and_fetch(keys, values)
    mx.eval([layer.order for layer in layers])
    times = []
    for owner in range(2, 2 + FORKS):
        start = perf_counter()
        group = extension.PagedGroup(pool, owner)
        forks = [layer.fork(group) for layer in layers]
        times.append(perf_counter() - start)
        del group, forks
    return median(times)


def copy_stock() -> float:
    caches = stock()
    new = rows(FORKED)
    for cache, keys, values in zip(caches, new[::2], new[1::2], strict=True):
        mx.eval(cache.update_and_fetch(keys, values))
    start = perf_counter()
    copies = copy.deepcopy(caches)
    mx.eval([copied.cache.state for copied in copies])
    return perf_counter() - start


def tasks() -> list[Task]:
    contestants: dict[str, Callable[[], Sequence[Any]]] = {OURS: paged, "stock": stock}
    return [
        Task(
            "append, mean, a layer",
            "us",
            {name: lambda make=make: mean_per_layer(make) for name, make in contestants.items()},
            reach_value=14,
        ),
        Task(
            "append, worst step, a layer",
            "ms",
            {name: lambda make=make: worst_per_layer(make) for name, make in contestants.items()},
            reach_value=0.3,
        ),
        Task(
            "fork of 1,000 tokens, 32 layers",
            "ms",
            {OURS: fork_paged, "stock": copy_stock},
            reach_value=0.2,
        ),
    ]


if __name__ == "__main__":
    main("Paged appends and forks", tasks)
