"""Gemma 3 270M through the pool: five layers of six keep a sliding window only."""

from __future__ import annotations

import kvpool
from cache_kinds import ON_GPU, all_returned
from kvpool import build_paged_caches
from kvpool.memory import BlockPoolAllocator, PoolConfig, build_pooled_caches
from stock import GEMMA3_PREFILL_STEP, GEMMA3_TOKENS, GEMMA3_WINDOW, decode


def test_greedy_decoding_past_the_window_is_identical(gemma3, gemma3_prompt, gemma3_stock):
    model, _ = gemma3
    assert len(gemma3_prompt) > GEMMA3_WINDOW
    total = len(gemma3_prompt) + GEMMA3_TOKENS
    config = PoolConfig.for_model(model, max_tokens=total, prefill_step=GEMMA3_PREFILL_STEP)
    pool = BlockPoolAllocator(config)
    # The pool has just enough blocks: what one layer had to spare, another would lack.
    caches = build_pooled_caches(model, pool, owner=1, step=config.block_size)
    tokens = decode(
        model, gemma3_prompt, GEMMA3_TOKENS, caches, prefill_step_size=GEMMA3_PREFILL_STEP
    )

    # Window layers hold less than the sequence; every sixth layer holds all of it.
    held = [cache.keys.shape[2] for cache in caches]
    most = GEMMA3_WINDOW + GEMMA3_PREFILL_STEP - 1
    for index, (cache, rows) in enumerate(zip(caches, held, strict=True)):
        cache.check_invariants()
        assert rows >= total if index % 6 == 5 else rows <= most
    caches[0].release()
    assert pool.stats.blocks_in_use() == 0
    pool.check_invariants()

    assert tokens == gemma3_stock.result()


def test_paged_caches_past_the_window_give_the_same_tokens(gemma3, gemma3_prompt, gemma3_stock):
    model, _ = gemma3
    total = len(gemma3_prompt) + GEMMA3_TOKENS
    config = PoolConfig.for_model(
        model, max_tokens=total, prefill_step=GEMMA3_PREFILL_STEP, paged=True
    )
    pool = BlockPoolAllocator(config)
    caches = build_paged_caches(model, pool, owner=1)
    before = kvpool.attention_stats()
    with kvpool.attention():
        tokens = decode(
            model, gemma3_prompt, GEMMA3_TOKENS, caches, prefill_step_size=GEMMA3_PREFILL_STEP
        )
    answered = kvpool.attention_stats().since(before)
    assert answered.total >= 18 * GEMMA3_TOKENS
    assert answered.kernel == (0 if ON_GPU else answered.total)  # a GPU gathers pages of fp32
    for index, cache in enumerate(caches):
        assert cache.window == (None if index % 6 == 5 else GEMMA3_WINDOW)
        n_blocks = 2 * -(-total // config.block_size)
        assert cache.n_blocks_held() <= (n_blocks if cache.window is None else 2 * 4)
    caches[0].check_invariants()
    caches[0].release()
    assert all_returned(pool)
    assert tokens == gemma3_stock.result()


def test_it_continues_sensibly(gemma3):
    model, tokenizer = gemma3
    prompt = tokenizer.encode("One, two, three, four,")
    pool = BlockPoolAllocator(PoolConfig.for_model(model, max_tokens=len(prompt) + 6))
    caches = build_pooled_caches(model, pool, owner=1)
    assert tokenizer.decode(decode(model, prompt, 6, caches)) == " five, six, seven,"
