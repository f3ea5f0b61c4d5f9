"""The kinds of caches that the contracts in this folder hold for, and what their tests share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import kvpool
import mlx.core as mx
import pytest
from kvpool import build_paged_caches, build_pooled_caches
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm import pool_model
from kvpool.mlx_lm.caches import PoolBackedKVCache, PoolBackedRotatingKVCache
from kvpool.mlx_lm.paged import PagedKVCache
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import KVCache, RotatingKVCache
from tiny_models import VOCABULARY


@dataclass(frozen=True)
class Kind:
    """One kind of cache.

    Args:
        name: What a test is called by.
        cls: The class of one layer's cache.
        options: What its constructor takes beside the pool and the owner.
        build_options: What the builder of a request's caches takes beside those.
        hooked: Whether models run with the attention hook.
        dtype: What the numbers are kept in; None for the type that they come in.
        error: How far a number may be from what was put in, relative to it.
    """

    name: str
    cls: Any
    options: dict[str, Any] = field(default_factory=dict)
    build_options: dict[str, Any] = field(default_factory=dict)
    hooked: bool = False
    format: str | None = None
    error: float = 0.0

    def __str__(self) -> str:
        return self.name

    @property
    def paged(self) -> bool:
        return self.cls is PagedKVCache

    @property
    def ring(self) -> bool:
        return self.cls is PoolBackedRotatingKVCache

    @property
    def window(self) -> int | None:
        return self.options.get("window") or self.options.get("max_size")

    def make(self, pool: Any, owner: Any = -1) -> Any:
        """A cache that is a group of its own."""
        return self.cls(pool=pool, owner=owner, **self.options)

    def stock(self) -> Any:
        """The cache of mlx-lm that this kind stands in for."""
        return KVCache() if self.window is None else RotatingKVCache(self.window)

    def build(self, model: Any, pool: Any, owner: Any = 1, **options: Any) -> list[Any]:
        """The caches of a request to ``model``."""
        build = build_paged_caches if self.paged else build_pooled_caches
        return build(model, pool, owner, **{**self.build_options, **options})

    def layers(self, pool: Any, n_layers: int = 3, owner: int = 1, **options: Any) -> list[Any]:
        """The caches of a request to a model of ``n_layers`` layers of this kind."""
        model = SimpleNamespace(make_cache=lambda: [self.stock() for _ in range(n_layers)])
        return self.build(model, pool, owner, **options)

    def by_default(self) -> Kind:
        """This kind as it is built without options."""
        return replace(self, build_options={})

    def pool_model(self, model: Any, pool: Any) -> AbstractContextManager[Any]:
        return pool_model(model, pool, paged=self.paged, **self.build_options)

    def attention(self) -> AbstractContextManager[Any]:
        """What models run in."""
        return kvpool.attention() if self.hooked else nullcontext()

    def state(self, keys: Any, values: Any, offset: int) -> tuple[Any, ...]:
        """A state for ``cls.from_state``: these buffers, of which ``offset`` rows are tokens."""
        return (keys, values, offset, *((0, self.window, offset) if self.ring else ()))

    def blocks_charged(self, cache: Any) -> int:
        """What the pool ought to have given: for buffers by their rows, for pages by the tokens."""
        block_size = cache.pool.config.block_size
        if self.paged:
            return 2 * -(-cache.offset // block_size)
        if cache.keys is None:
            return 0
        batch, _, n_rows, _ = cache.keys.shape
        return 2 * batch * -(-n_rows // block_size)

    def check(self, *caches: Any) -> None:
        for cache in caches:
            cache.check_invariants()
            cache.pool.check_invariants()
            assert cache.n_blocks_held() == self.blocks_charged(cache)

    def same(self, found: Any, expected: mx.array) -> bool:
        """Whether these are the numbers that were put in."""
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return False
        return mx.allclose(found, expected, rtol=self.error, atol=0).item()


POOLED = Kind("pooled", PoolBackedKVCache)
RING = Kind("pooled-ring", PoolBackedRotatingKVCache, {"max_size": 1024})
PAGED = Kind("paged", PagedKVCache)
WINDOW = Kind("paged-window", PagedKVCache, {"window": 1024})

#: Caches of one layer; windows are wider than what a test puts in.
SINGLES = [
    POOLED,
    Kind("pooled-step", PoolBackedKVCache, {"step": 16}),
    RING,
    PAGED,
    WINDOW,
    Kind("paged-fp16", PagedKVCache, {"format": "fp16"}, format="fp16"),
    Kind("paged-int8", PagedKVCache, {"format": "int8"}, format="int8", error=0.01),
]

#: Caches whose windows are soon full.
WINDOWS = [
    Kind("pooled-ring", PoolBackedRotatingKVCache, {"max_size": 8}),
    Kind("paged-window", PagedKVCache, {"window": 8}),
]

#: Caches of whole requests.
REQUESTS = [Kind("pooled", PoolBackedKVCache, {"step": 4}, build_options={"step": 4}), PAGED]

#: Caches that models run with.
DECODING = [
    POOLED,
    Kind("paged-gathered", PagedKVCache),
    Kind("paged", PagedKVCache, hooked=True),
]


#: Whether MLX computes on a GPU, whose kernels read fewer kinds of pages (docs/gpu.md).
ON_GPU = mx.default_device() == mx.gpu

needs_method_kernels = pytest.mark.skipif(
    ON_GPU, reason="a GPU has no kernels for pages that a method encodes"
)


def make_pool(n_blocks: int = 256, block_size: int = 16, **options: Any) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=n_blocks, **options))


def rows(
    n: int, dims: int = 4, dtype: mx.Dtype = mx.float32, start: int = 0, batch: int = 1
) -> mx.array:
    """Rows that tell which token they are."""
    ids = mx.arange(start, start + n, dtype=mx.float32)[None, None, :, None]
    return mx.broadcast_to(ids, (batch, 2, n, dims)).astype(dtype)


def append(cache: Any, n: int, **options: Any) -> tuple[mx.array, mx.array]:
    data = rows(n, start=cache.offset, **options)
    return cache.update_and_fetch(data, data)


def blocks_for(n_tokens: int, block_size: int = 16) -> int:
    """Blocks that hold as many tokens, and no more."""
    return 2 * -(-n_tokens // block_size)


def offsets(caches: list[Any]) -> list[int]:
    return [cache.offset for cache in caches]


def prompt(n_tokens: int, first: int = 3) -> list[int]:
    return [(7 * i + first) % VOCABULARY for i in range(n_tokens)]


def decode(model: Any, caches: list[Any], tokens: list[int], n: int, **options: Any) -> list[int]:
    """The next ``n`` tokens by greedy choice."""
    steps = generate_step(mx.array(tokens), model, max_tokens=n, prompt_cache=caches, **options)
    return [int(token) for token, _ in steps]


def in_use(pool: BlockPoolAllocator) -> int:
    """Blocks that owners or readers hold, once the device has done what was asked of it."""
    mx.synchronize()
    return pool.stats.blocks_in_use()


def all_returned(pool: BlockPoolAllocator) -> bool:
    mx.synchronize(generation_stream)  # mlx-lm computes one token that it never delivers
    pool.check_invariants()
    return in_use(pool) == 0
