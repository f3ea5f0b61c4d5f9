"""Random calls on pooled batches give what mlx-lm's own batches give, and the books follow."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm.caches import PoolBackedKVCache, PoolBackedRotatingKVCache
from mlx_lm.models.cache import KVCache, RotatingKVCache

WINDOW = 8
BLOCK_SIZE = 4

lengths = st.lists(st.integers(0, 11), min_size=1, max_size=3)
calls = st.one_of(
    st.tuples(st.just("tokens"), st.integers(1, 5)),
    st.tuples(st.just("padded"), st.lists(st.integers(0, 6), min_size=8, max_size=8)),
    st.tuples(st.just("filter"), st.lists(st.integers(0, 7), min_size=1, max_size=4)),
    st.tuples(st.just("extend"), lengths),
    st.tuples(st.just("extract"), st.integers(0, 7)),
    st.tuples(st.just("trim"), st.integers(0, 3)),
    st.tuples(st.just("copy"), st.none()),
)


class Pair:
    """A pooled batch and mlx-lm's, put through the same calls."""

    def __init__(self, kind: str, n_tokens: list[int]) -> None:
        self.kind = kind
        self.pool = BlockPoolAllocator(PoolConfig(block_size=BLOCK_SIZE, n_blocks=4096))
        self.drawn = 0
        self.pooled, self.stock = self.batch(n_tokens)
        self.check()

    def numbers(self, batch: int, n_tokens: int) -> mx.array:
        start, self.drawn = self.drawn, self.drawn + batch * 2 * n_tokens * 3
        return mx.arange(start, self.drawn, dtype=mx.float32).reshape(batch, 2, n_tokens, 3)

    def single(self) -> tuple[Any, Any]:
        if self.kind == "plain":
            return PoolBackedKVCache(self.pool, self.pool.new_owner(), step=16), KVCache()
        ours = PoolBackedRotatingKVCache(self.pool, WINDOW, self.pool.new_owner())
        return ours, RotatingKVCache(WINDOW)

    def batch(self, n_tokens: list[int]) -> tuple[Any, Any]:
        singles = [self.single() for _ in n_tokens]
        for caches, n in zip(singles, n_tokens, strict=True):
            for chunk in (n // 2, n - n // 2):
                self.append(caches, 1, chunk)
        ours, theirs = zip(*singles, strict=True)
        return ours[0].merge(list(ours)), theirs[0].merge(list(theirs))

    def append(self, caches: tuple[Any, Any], batch: int, n_tokens: int) -> None:
        if n_tokens == 0:
            return
        new = self.numbers(batch, n_tokens)
        self.same(caches, [cache.update_and_fetch(new, -new) for cache in caches])

    @property
    def n_sequences(self) -> int:
        return len(self.pooled.row_owners)

    def call(self, name: str, argument: Any) -> None:
        n = self.n_sequences
        caches = (self.pooled, self.stock)
        if name == "tokens":
            self.append(caches, n, argument)
        elif name == "padded":
            sizes = [1 + length for length in argument][:n]
            sizes += [1] * (n - len(sizes))
            padding = [max(sizes) - size for size in sizes]
            for cache in caches:
                cache.prepare(lengths=sizes, right_padding=padding)
            if max(padding) > 0 and max(sizes) > 2:
                self.append(caches, n, 2)
                self.append_last(caches, n, max(sizes) - 2)
            else:
                self.append_last(caches, n, max(sizes))
            for cache in caches:
                cache.finalize()
        elif name == "filter":
            keep = sorted({idx % n for idx in argument})
            for cache in caches:
                cache.filter(keep)
        elif name == "extend":
            for cache, other in zip(caches, self.batch(argument), strict=True):
                cache.extend(other)
        elif name == "extract":
            if self.pooled.empty():
                assert self.pooled.extract(argument % n).empty()
                return
            ours, theirs = (cache.extract(argument % n) for cache in caches)
            if theirs.size() == 0:
                assert ours.empty()
                return
            self.same((ours, theirs))
            assert ours.owner == self.pooled.row_owners[argument % n]
            self.append((ours, theirs), 1, 1)
            ours.check_invariants()
        elif name == "trim":
            assert self.pooled.is_trimmable() == self.stock.is_trimmable()
            if self.stock.is_trimmable():
                least = min(self.stock.offset.tolist())
                assert len({cache.trim(min(argument, max(least, 0))) for cache in caches}) == 1
        elif name == "copy":
            self.pooled = copy.deepcopy(self.pooled)
        self.check()

    def append_last(self, caches: tuple[Any, Any], n: int, n_tokens: int) -> None:
        """A chunk; a ring refuses a single token before its padding is settled, as stock does."""
        if self.kind == "ring" and n_tokens == 1 and self.stock._lengths is not None:
            for cache in caches:
                with pytest.raises(RuntimeError, match="finalize"):
                    cache.update_and_fetch(*2 * [self.numbers(n, 1)])
            n_tokens = 2
        self.append(caches, n, n_tokens)

    def same(self, caches: tuple[Any, Any], fetched: Any = None) -> None:
        """Equal but for the padding of plain batches, which shows what lay there before."""
        ours, theirs = fetched or [cache.keys_and_values() for cache in caches]
        padding = getattr(caches[1], "left_padding", None) if self.kind == "plain" else None
        for mine, stock in zip(ours, theirs, strict=True):
            assert mine.shape == stock.shape
            token = mx.array(True)
            if padding is not None:
                token = (mx.arange(mine.shape[2]) >= padding[:, None])[:, None, :, None]
            assert mx.array_equal(mx.where(token, mine, 0), mx.where(token, stock, 0))

    def check(self) -> None:
        pooled, stock = self.pooled, self.stock
        pooled.check_invariants()
        self.pool.check_invariants()
        assert pooled.empty() or not stock.empty()
        assert pooled.size() == stock.size()
        assert pooled.offset.tolist() == stock.offset.tolist()
        assert pooled.left_padding.tolist() == stock.left_padding.tolist()
        if pooled.empty():
            assert pooled.n_blocks_held() == 0
            return
        self.same((pooled, stock))
        assert pooled.n_blocks_held() == 2 * self.n_sequences * -(-pooled.keys.shape[2] // 4)
        for n_tokens in (1, 3):
            if n_tokens > 1 and self.kind == "ring" and self.stock.rotated:
                continue  # mlx-lm's mask hides a row too many there
            assert mx.array_equal(pooled.make_mask(n_tokens), stock.make_mask(n_tokens))


@pytest.mark.parametrize("kind", ["plain", "ring"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_calls(kind, data):
    pair = Pair(kind, data.draw(lengths))
    for name, argument in data.draw(st.lists(calls, max_size=7)):
        if pair.n_sequences > 6:
            break
        pair.call(name, argument)
    pool = pair.pool
    del pair
    assert pool.stats.blocks_in_use() == 0
