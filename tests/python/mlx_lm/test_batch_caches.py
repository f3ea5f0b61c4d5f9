"""What a pooled batch is charged, to whom, and what happens where the pool is too small."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from kvpool import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm.caches import (
    PoolBackedBatchKVCache,
    PoolBackedBatchRotatingKVCache,
    PoolBackedKVCache,
    PoolBackedRotatingKVCache,
    attach_caches,
)
from kvpool.mlx_lm.caches._group import CacheGroup
from mlx_lm.models.cache import KVCache

BLOCK_SIZE = 4


def make_pool(n_blocks: int = 4096, **options) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=BLOCK_SIZE, n_blocks=n_blocks, **options))


def tokens(batch: int, n_tokens: int, start: int = 0) -> mx.array:
    numbers = mx.arange(start, start + n_tokens, dtype=mx.float32)
    return mx.broadcast_to(numbers[None, None, :, None], (batch, 1, n_tokens, 2))


def feed(caches, n_tokens: int, start: int = 0) -> None:
    for cache in caches:
        batch = len(cache.row_owners) if hasattr(cache, "row_owners") else 1
        new = tokens(batch, n_tokens, start)
        cache.update_and_fetch(new, -new)


def request(pool, owner: int, n_tokens: int, n_layers: int = 2, step: int | None = 1) -> list:
    group = CacheGroup(pool, owner)
    caches = [PoolBackedKVCache._member(group, step) for _ in range(n_layers)]
    if n_tokens:
        feed(caches, n_tokens)
    return caches


def merged(*requests) -> list:
    return [layer[0].merge(list(layer)) for layer in zip(*requests, strict=True)]


def check(pool, *caches) -> None:
    pool.check_invariants()
    for cache in caches:
        cache.check_invariants()


def ring(pool, n_tokens: int, window: int, owner: int = 1, chunk: int = 16):
    cache = PoolBackedRotatingKVCache(pool, window, owner)
    for start in range(0, n_tokens, chunk):
        feed([cache], min(chunk, n_tokens - start), start)
    return cache


# --- what is charged ------------------------------------------------------------------------------


def test_a_merge_charges_every_row_of_every_sequence_and_counts_padding_as_unused():
    pool = make_pool()
    batch = merged(request(pool, 1, 9), request(pool, 2, 2))
    check(pool, *batch)
    assert all(type(cache) is PoolBackedBatchKVCache for cache in batch)
    assert [cache.n_blocks_held() for cache in batch] == 2 * [2 * 2 * 3]  # 9 rows: 3 blocks each
    assert pool.stats.blocks_in_use() == 2 * 12
    # Of 12 slots of each stream the one sequence fills 9 and the other 2.
    assert pool.stats.unused_slots() == 2 * 2 * ((12 - 9) + (12 - 2))
    assert pool.stats.fragmentation() > 0


def test_a_batch_has_an_owner_of_its_own_and_its_sequences_remember_theirs():
    pool = make_pool()
    batch = merged(request(pool, 1, 5), request(pool, 2, 3))
    assert batch[0].owner == batch[1].owner not in (1, 2)
    assert batch[0].row_owners == (1, 2)
    assert pool.blocks_for(1) == pool.blocks_for(2) == []
    assert len(pool.blocks_for(batch[0].owner)) == 16
    second = [cache.extract(1) for cache in batch]
    assert [cache.owner for cache in second] == [2, 2]
    assert [type(cache) for cache in second] == [PoolBackedKVCache, PoolBackedKVCache]
    assert len(pool.blocks_for(2)) == 2 * 2  # 3 tokens: a block a stream and layer
    check(pool, *batch, *second)
    second[0].release()  # the layers are a group
    assert second[1].empty() and pool.blocks_for(2) == []


def test_the_blocks_of_a_request_go_back_when_it_leaves_the_batch():
    pool = make_pool()
    batch = merged(request(pool, 1, 9), request(pool, 2, 2), request(pool, 3, 6))
    for cache in batch:
        cache.filter([1, 2])
    check(pool, *batch)
    assert batch[0].row_owners == (2, 3)
    assert batch[0].left_padding.tolist() == [4, 0]  # moved to the left by the 3 columns both left
    assert pool.stats.blocks_in_use() == 2 * 2 * 2 * 2
    for cache in batch:
        cache.filter([])
    check(pool, *batch)
    assert pool.stats.blocks_in_use() == 0


def test_extending_a_batch_charges_the_new_rows():
    pool = make_pool()
    batch, other = merged(request(pool, 1, 9)), merged(request(pool, 2, 2), request(pool, 3, 3))
    for cache, new in zip(batch, other, strict=True):
        cache.extend(new)
    assert pool.n_available("k") == pool.n_free("k")  # nothing stays reserved
    other_blocks = sum(cache.n_blocks_held() for cache in other)
    assert pool.stats.blocks_in_use() == other_blocks + 2 * 2 * 3 * 3
    del other, new
    assert batch[1].row_owners == (1, 2, 3)
    assert pool.stats.blocks_in_use() == 2 * 2 * 3 * 3
    check(pool, *batch)


def test_padding_on_the_right_goes_to_the_left_and_is_unused_then():
    pool = make_pool()
    batch = merged(request(pool, 1, 0, 1), request(pool, 2, 0, 1))
    batch[0].prepare(lengths=[7, 3], right_padding=[0, 4])
    feed(batch, 7)
    assert pool.stats.unused_slots() == 2 * 2 * 1
    batch[0].finalize()
    check(pool, *batch)
    assert batch[0].offset.tolist() == [7, 3]
    assert pool.stats.unused_slots() == 2 * (1 + 5)
    keys, _ = batch[0].keys_and_values()
    assert keys[1, 0, 4:, 0].tolist() == [0, 1, 2]


def test_a_ring_takes_padding_into_use_as_it_turns():
    pool = make_pool()
    batch = PoolBackedRotatingKVCache.merge([ring(pool, 8, 8), ring(pool, 5, 8)])
    check(pool, batch)
    assert pool.stats.unused_slots() == 2 * 3
    for i, unused in enumerate((2, 1, 0, 0)):
        feed([batch], 1, 100 + i)
        check(pool, batch)
        assert pool.stats.unused_slots() == 2 * unused
    assert batch.offset.tolist() == [12, 9]


def test_a_deep_copy_has_its_own_owner_and_charge():
    pool = make_pool()
    batch = merged(request(pool, 1, 9), request(pool, 2, 2))
    twins = copy.deepcopy(batch)
    assert twins[0].owner == twins[1].owner != batch[0].owner
    assert twins[0].row_owners == (1, 2)
    assert pool.stats.blocks_in_use() == 2 * 24
    feed(twins, 1, 50)
    assert batch[0].size() == 9 and twins[0].size() == 10
    check(pool, *batch, *twins)
    del batch
    assert pool.stats.blocks_in_use() == 24


def test_release_empties_every_layer_of_the_batch():
    pool = make_pool()
    batch = merged(request(pool, 1, 9), request(pool, 2, 2))
    batch[1].release()
    assert pool.stats.blocks_in_use() == 0 and batch[0].empty()
    feed(batch, 3)
    assert batch[0].offset.tolist() == [3, 3]
    check(pool, *batch)


@pytest.mark.parametrize("book", ["_lags", "_first_padding", "_owners"])
def test_books_that_are_not_of_as_many_sequences_are_found(book):
    pool = make_pool()
    (batch,) = merged(request(pool, 1, 5, 1), request(pool, 2, 3, 1))
    batch.check_invariants()
    setattr(batch, book, getattr(batch, book)[:1])
    with pytest.raises(RuntimeError, match="not of as many sequences"):
        batch.check_invariants()


# --- where the pool is too small ------------------------------------------------------------------


def test_a_merge_that_does_not_fit_leaves_its_sources_as_they_were():
    pool = make_pool(n_blocks=2 * 2 * (3 + 1) + 3)  # the batch would take 2 * 2 * (3 + 3)
    long, short = request(pool, 1, 9), request(pool, 2, 2)
    with pytest.raises(BlockPoolExhaustedError, match=r"^\[PoolBackedKVCache::merge\]"):
        merged(long, short)
    check(pool, *long, *short)
    assert [len(pool.blocks_for(owner)) for owner in (1, 2)] == [12, 4]
    assert pool.stats.blocks_in_use() == 16
    assert pool.n_available("k") == pool.n_free("k")


def test_a_merge_takes_the_blocks_of_its_sources_where_there_is_no_room_for_both():
    pool = make_pool(n_blocks=2 * 2 * (3 + 3))
    long, short = request(pool, 1, 9), request(pool, 2, 2)
    batch = merged(long, short)
    assert pool.stats.blocks_in_use() == 2 * 2 * 6
    check(pool, *batch, *long)
    keys, _ = batch[0].keys_and_values()
    assert keys[1, 0, 7:, 0].tolist() == [0, 1]
    del batch
    feed(long, 1, 9)  # charged again
    assert len(pool.blocks_for(1)) == 12
    check(pool, *long, *short)


def test_an_extension_that_does_not_fit_changes_no_layer():
    pool = make_pool(n_blocks=2 * 2 * (3 + 2) + 2)
    batch, other = merged(request(pool, 1, 9)), merged(request(pool, 2, 1), request(pool, 3, 1))
    with pytest.raises(BlockPoolExhaustedError, match=r"^\[PoolBackedBatchKVCache::extend\]"):
        batch[0].extend(other[0])
    assert [cache.row_owners for cache in (*batch, *other)] == 2 * [(1,)] + 2 * [(2, 3)]
    assert pool.stats.blocks_in_use() == 2 * 2 * 5
    assert pool.n_available("k") == pool.n_free("k")
    check(pool, *batch, *other)


def test_an_extension_gives_up_spare_rows_before_it_fails():
    pool = make_pool(n_blocks=2 * 2 * 20)
    batch = merged(request(pool, 1, 8, step=None))
    other = merged(request(pool, 2, 9), request(pool, 3, 9))
    feed(batch, 1, 8)
    assert 3 * batch[0].n_blocks_held() > 2 * 20  # three sequences of that length are too much
    for cache, new in zip(batch, other, strict=True):
        cache.extend(new)
    check(pool, *batch)
    del other, new
    assert [cache.keys.shape[2] for cache in batch] == [12, 12]
    keys, _ = batch[0].keys_and_values()
    assert keys[:, 0, :, 0].tolist() == 3 * [list(range(9))]
    assert pool.stats.blocks_in_use() == 2 * 2 * 3 * 3


@pytest.mark.parametrize("grow", [False, True])
def test_extending_copying_and_extracting_need_no_more_than_what_stays(grow):
    pool = make_pool(n_blocks=2 * 2 * (3 + 3), grow_on_exhaustion=grow)
    batch, other = merged(request(pool, 1, 9)), merged(request(pool, 2, 9))
    for cache, new in zip(batch, other, strict=True):
        cache.extend(new)
    del other, new
    check(pool, *batch)
    assert pool.stats.blocks_in_use() == 24
    # As mlx-lm splits a batch: a copy, and each side keeps its own.
    twins = copy.deepcopy(batch)
    for cache in batch:
        cache.filter([0])
    for cache in twins:
        cache.filter([1])
    check(pool, *batch, *twins)
    assert pool.stats.blocks_in_use() == 24
    # As mlx-lm ends a request: what it holds is extracted while the batch still has it.
    done = [cache.extract(0) for cache in twins]
    for cache in twins:
        cache.filter([])
    check(pool, *batch, *twins, *done)
    assert [len(pool.blocks_for(owner)) for owner in (2, batch[0].owner)] == [12, 12]
    keys, _ = done[1].keys_and_values()
    assert keys[0, 0, :, 0].tolist() == list(range(9))
    assert pool.stats.n_exhausted == pool.stats.n_grown == 0


def test_a_batch_that_lent_its_blocks_is_charged_again_by_its_next_step():
    pool = make_pool(n_blocks=2 * 2 * (3 + 3))
    batch = merged(request(pool, 1, 9), request(pool, 2, 9))
    kept = [cache.extract(1) for cache in batch]
    assert pool.stats.blocks_in_use() == 24
    with pytest.raises(BlockPoolExhaustedError, match="0 tokens fit"):
        feed(batch, 1)
    check(pool, *batch, *kept)
    del kept
    feed(batch, 1)
    assert pool.stats.blocks_in_use() == 24
    check(pool, *batch)


# --- steps cut short ------------------------------------------------------------------------------


@pytest.mark.parametrize("n_before", [5, 8, 11, 21])
@pytest.mark.parametrize("n_undone", [1, 3])
@pytest.mark.parametrize("n_after", [1, 4])
def test_a_ring_goes_on_after_a_step_was_taken_back(n_before, n_undone, n_after):
    def rows(torn: bool):
        pool = make_pool()
        requests = []
        for owner, n_tokens in ((1, n_before), (2, n_before - 3)):
            group = CacheGroup(pool, owner)
            layers = [PoolBackedRotatingKVCache._member(group, None, 8, 0) for _ in range(2)]
            feed(layers, n_tokens)
            requests.append(layers)
        batch = merged(*requests)
        feed(batch, 1, 50)
        if torn:
            feed(batch[:1], n_undone, 70)
        mask = batch[0].make_mask(n_after)
        feed(batch, n_after, 80)
        check(pool, *batch)
        keys, _ = batch[0].keys_and_values()
        if mask.ndim == 2:
            mask = mask[None, None]
        mask = mx.broadcast_to(mask, (2, 1, n_after, keys.shape[2]))
        seen = [
            [
                sorted(np.array(keys[row, 0, :, 0])[np.array(mask[row, 0, q])])
                for q in range(n_after)
            ]
            for row in range(2)
        ]
        return seen, batch[0].offset.tolist()

    assert rows(torn=True) == rows(torn=False)


# --- bad input ------------------------------------------------------------------------------------


def test_sequences_that_cannot_lie_in_one_buffer():
    pool = make_pool()
    one, wide, two = (PoolBackedKVCache(pool, owner) for owner in (1, 2, 3))
    feed([one], 3)
    wide.update_and_fetch(mx.zeros((1, 1, 3, 4)), mx.zeros((1, 1, 3, 2)))
    two.update_and_fetch(tokens(2, 3), tokens(2, 3))
    before = pool.stats.blocks_in_use()
    with pytest.raises(ValueError, match=r"merge\] the caches differ in heads or dims"):
        PoolBackedKVCache.merge([one, wide])
    with pytest.raises(
        ValueError, match=r"merge\] the caches must be of one sequence, got one of 2"
    ):
        PoolBackedKVCache.merge([one, two])
    with pytest.raises(ValueError, match="max_size differs between caches: \\[8, 9\\]"):
        PoolBackedRotatingKVCache.merge([ring(pool, 3, 8), ring(pool, 3, 9)])
    assert pool.stats.blocks_in_use() == before
    batch, other = PoolBackedKVCache.merge([one]), PoolBackedKVCache.merge([wide])
    with pytest.raises(ValueError, match=r"extend\] the caches differ in heads or dims"):
        batch.extend(other)
    check(pool, batch, other)


def test_stock_caches_may_join_a_pooled_one():
    pool = make_pool()
    stock = KVCache()
    stock.update_and_fetch(tokens(1, 3), tokens(1, 3))
    batch = PoolBackedKVCache.merge([*request(pool, 1, 5, 1), stock])
    assert batch.row_owners == (1, batch.owner)
    assert batch.extract(1).size() == 3
    check(pool, batch)


def test_loaded_caches_are_attached_before_they_are_merged():
    pool = make_pool()
    loose = [PoolBackedKVCache.from_state((tokens(1, n), tokens(1, n))) for n in (5, 2)]
    with pytest.raises(RuntimeError, match="attach"):
        PoolBackedKVCache.merge(loose)
    for owner, cache in enumerate(loose):
        cache.attach(pool, owner)
    batch = PoolBackedKVCache.merge(loose)
    assert batch.row_owners == (0, 1)
    check(pool, batch)


@pytest.mark.parametrize("kind", ["plain", "ring"])
def test_a_batch_comes_back_from_its_state(kind):
    pool = make_pool()
    single = (
        (lambda n: ring(pool, n, 8)) if kind == "ring" else (lambda n: request(pool, 1, n, 1)[0])
    )
    batch = (first := single(9)).merge([first, single(2)])
    loose = type(batch).from_state(batch.state)
    assert loose.pool is None and loose.n_blocks_held() == 0
    attach_caches([loose], pool, 5)
    assert loose.row_owners == (5, 5)
    for cache in (batch, loose):
        feed([cache], 1, 40)
    assert loose.offset.tolist() == batch.offset.tolist()
    assert mx.array_equal(loose.keys_and_values()[0], batch.keys_and_values()[0])
    check(pool, batch, loose)


def test_tokens_of_another_number_of_sequences_than_the_first():
    pool = make_pool()
    fresh = PoolBackedBatchKVCache(pool, [0, 3])
    with pytest.raises(ValueError, match="keys must be of 2 sequences, got 3"):
        fresh.update_and_fetch(tokens(3, 1), tokens(3, 1))
    with pytest.raises(ValueError, match="left_padding must have 2 items"):
        fresh.prepare(left_padding=[1, 2, 3])
    check(pool, fresh)


# --- field cases ----------------------------------------------------------------------------------


def test_field_F8_a_token_lands_behind_the_written_end_after_the_unpadded_row_left():
    pool = make_pool()
    batch = merged(request(pool, 1, 0, 1), request(pool, 2, 0, 1))[0]
    batch.prepare(left_padding=[0, 3])
    feed([batch], 10)
    batch.filter([1])
    feed([batch], 1, 10)
    keys, _ = batch.keys_and_values()
    assert batch.offset.tolist() == [8]
    assert keys[0, 0, :, 0].tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    check(pool, batch)


def test_field_F9_the_mask_counts_written_rows_and_hides_padding():
    pool = make_pool()
    for batch in (
        PoolBackedBatchKVCache(pool, [3]),
        PoolBackedBatchRotatingKVCache(pool, 8, [3]),
    ):
        assert batch.offset.tolist() == [-3]
        mask = batch.make_mask(4)
        assert mask.shape[-2:] == (4, 4)
        assert mask.reshape(4, 4).tolist() == [
            [False, False, False, False],
            [False, False, False, False],
            [False, False, False, False],
            [False, False, False, True],
        ]
