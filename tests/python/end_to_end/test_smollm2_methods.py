"""SmolLM2 over pages that a quantisation method encodes."""

from __future__ import annotations

import kvpool
from cache_kinds import all_returned, needs_method_kernels
from kvpool import BlockPoolAllocator, PoolConfig, build_paged_caches
from stock import decode

N_TOKENS = 48


@needs_method_kernels
def test_eight_bits_give_the_same_tokens_in_fewer_bytes(smollm2, smollm2_prompt, smollm2_stock):
    model, _ = smollm2
    pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=1024))
    caches = build_paged_caches(model, pool, 1, method="turboquant_mse", bits=8)
    before = kvpool.attention_stats()
    with kvpool.attention():
        tokens = decode(model, smollm2_prompt, N_TOKENS, caches)
    answered = kvpool.attention_stats().since(before)
    assert answered.kernel == answered.total >= 30 * N_TOKENS
    assert tokens == smollm2_stock.result()[:N_TOKENS]
    assert {block.format for block in pool.blocks_for(1)} == {"fp32", "turboquant_mse-8"}
    exact = 2 * 3 * 64 * 4  # bytes of a token of a layer in fp32
    assert caches[0].nbytes < 0.5 * exact * caches[0].offset
    caches[0].release()
    assert all_returned(pool)
