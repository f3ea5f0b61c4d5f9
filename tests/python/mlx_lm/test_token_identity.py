"""Pooled caches give the tokens that mlx-lm's own caches give, in fp32."""

from __future__ import annotations

import mlx.core as mx
import pytest
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.memory.pool_backed_cache import build_pooled_caches
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import VOCABULARY, all_models, needs_quantised_attention, tiny_llama

PROMPT = [(7 * i + 3) % VOCABULARY for i in range(21)]


def make_pool(n_blocks: int = 2048, block_size: int = 4) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=n_blocks))


def decode(model, cache, prompt=PROMPT, max_tokens=48, **options):
    steps = generate_step(
        mx.array(prompt), model, max_tokens=max_tokens, prompt_cache=cache, **options
    )
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("step", [None, 10])
@pytest.mark.parametrize("name", all_models())
def test_greedy_decoding_with_a_prompt_in_chunks(name, step):
    model = all_models()[name]()
    stock = decode(model, make_prompt_cache(model), prefill_step_size=8)
    pool = make_pool()
    caches = build_pooled_caches(model, pool, owner=1, step=step)
    assert decode(model, caches, prefill_step_size=8) == stock
    for cache, twin in zip(caches, make_prompt_cache(model), strict=True):
        cache.check_invariants()
        assert type(cache).__name__ == f"PoolBacked{type(twin).__name__}"
    caches[-1].release()
    assert pool.stats.blocks_in_use() == 0


def test_speculative_decoding():
    model, draft = tiny_llama(), tiny_llama(n_layers=2, seed=5)

    def run(cache):
        steps = speculative_generate_step(
            mx.array(PROMPT), model, draft, num_draft_tokens=3, max_tokens=40, prompt_cache=cache
        )
        return [int(token) for token, _, _ in steps]

    pool = make_pool()
    pooled = build_pooled_caches(model, pool, 1) + build_pooled_caches(draft, pool, 2)
    assert run(pooled) == run(make_prompt_cache(model) + make_prompt_cache(draft))
    for cache in pooled:
        cache.check_invariants()


def test_a_second_request_reuses_the_blocks_of_the_first():
    model = tiny_llama()
    other = PROMPT[::-1]
    pool = make_pool(n_blocks=2 * 3 * 64)  # 256 rows a layer and stream, no more
    first = build_pooled_caches(model, pool, owner=1)
    assert decode(model, first) == decode(model, make_prompt_cache(model))
    first[0].release()
    second = build_pooled_caches(model, pool, owner=2)
    assert decode(model, second, other) == decode(model, make_prompt_cache(model), other)
    assert pool.stats.n_reused == pool.stats.blocks_in_use() == 2 * 3 * 64


def test_two_requests_side_by_side():
    model = tiny_llama()
    pool = make_pool()
    prompts = [PROMPT, PROMPT[:9]]
    caches = [build_pooled_caches(model, pool, owner) for owner in (1, 2)]
    streams = [
        generate_step(mx.array(p), model, max_tokens=20, prompt_cache=c)
        for p, c in zip(prompts, caches, strict=True)
    ]
    tokens = [[int(t) for t, _ in pair] for pair in zip(*streams, strict=True)]
    for i, prompt in enumerate(prompts):
        stock = decode(model, make_prompt_cache(model), prompt, max_tokens=20)
        assert [pair[i] for pair in tokens] == stock


def test_quantising_while_decoding():
    needs_quantised_attention()
    model = tiny_llama()
    options = {"kv_bits": 8, "quantized_kv_start": 10, "max_tokens": 30}
    pool = make_pool()
    caches = build_pooled_caches(model, pool, owner=1)
    assert decode(model, caches, **options) == decode(model, make_prompt_cache(model), **options)
    assert [type(cache).__name__ for cache in caches] == 3 * ["PoolBackedQuantizedKVCache"]
    assert pool.stats.blocks_in_use() == 3 * 2 * 64
    caches[1].release()
    assert pool.stats.blocks_in_use() == 0
