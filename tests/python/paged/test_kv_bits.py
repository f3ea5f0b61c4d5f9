"""mlx-lm's ``kv_bits`` over paged caches: pages narrow once, while decoding."""

from __future__ import annotations

import mlx.core as mx
import pytest
from kvpool import PagedKVCache, build_paged_caches
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from mlx_lm.generate import generate_step
from tiny_models import tiny_llama

PROMPT = [(7 * i + 3) % 97 for i in range(40)]
N_TOKENS = 20
BLOCK = 4
N_BLOCKS = 2 * 3 * -(-(len(PROMPT) + N_TOKENS) // BLOCK)  # keys and values in three layers


def decode(pool: BlockPoolAllocator, **options) -> tuple[list[int], list[PagedKVCache]]:
    model = tiny_llama()
    caches = build_paged_caches(model, pool, 1)
    steps = generate_step(
        mx.array(PROMPT), model, prompt_cache=caches, max_tokens=N_TOKENS, kv_bits=8, **options
    )
    return [int(token) for token, _ in steps], caches


def make_pool(n_blocks: int) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=BLOCK, n_blocks=n_blocks))


@pytest.mark.parametrize("start", [0, len(PROMPT) + 5])
def test_tokens_are_narrowed_once_and_not_at_every_step(start):
    pool = make_pool(8 * N_BLOCKS)
    _, caches = decode(pool, quantized_kv_start=start)
    assert {str(cache) for cache in caches} == {"PagedKVCache(owner=1, offset=60, format=int8)"}
    assert pool.stats.n_allocations <= 2 * N_BLOCKS


def test_a_cache_that_finds_no_room_stays_as_it_was():
    pool = make_pool(8)
    cache = PagedKVCache(pool, 1)
    data = mx.random.normal((1, 2, 16, 64), key=mx.random.key(3))
    mx.eval(cache.update_and_fetch(data, data))
    with pytest.raises(BlockPoolExhaustedError):
        cache.to_quantized(bits=8)
    assert (cache.offset, cache.n_blocks_held(), pool.stats.blocks_in_use()) == (16, 8, 8)
    assert mx.array_equal(cache.keys, data)
    cache.check_invariants()
