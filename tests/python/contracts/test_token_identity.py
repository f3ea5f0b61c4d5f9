"""Every kind of cache gives the tokens that mlx-lm's own caches give, in fp32."""

from __future__ import annotations

import kvpool
import mlx.core as mx
import pytest
from cache_kinds import DECODING, ON_GPU, POOLED, all_returned, decode, in_use, make_pool, prompt
from kvpool.mlx_lm.paged import PagedKVCache
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from tiny_models import (
    all_models,
    needs_quantised_attention,
    tiny_gpt2,
    tiny_lfm2,
    tiny_llama,
    tiny_qwen3,
)

over_kinds = pytest.mark.parametrize("kind", DECODING, ids=str)
PROMPT = prompt(21)
MODELS = {**all_models(), "qwen3": tiny_qwen3, "gpt2": tiny_gpt2, "lfm2": tiny_lfm2}


@pytest.fixture(scope="module")
def stock_tokens():
    """What mlx-lm's own caches give, asked once a model."""
    known = {}

    def tokens(name: str) -> list[int]:
        if name not in known:
            model = MODELS[name]()
            cache = make_prompt_cache(model)
            known[name] = decode(model, cache, PROMPT, 40, prefill_step_size=8)
        return known[name]

    return tokens


def _sizes(kind):
    """Blocks of 4 and 16 tokens; of buffers their step counts, too."""
    if kind is POOLED:
        return [(4, {}), (4, {"step": 10})]
    return [(4, {}), (16, {})]


@pytest.mark.parametrize(
    ("kind", "block_size", "options"),
    [(kind, size, options) for kind in DECODING for size, options in _sizes(kind)],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_decoding_with_a_prompt_in_chunks(name, kind, block_size, options, stock_tokens):
    model = MODELS[name]()
    pool = make_pool(2048, block_size)
    caches = kind.build(model, pool, **options)
    before = kvpool.attention_stats()
    with kind.attention():
        assert decode(model, caches, PROMPT, 40, prefill_step_size=8) == stock_tokens(name)
    charged = []
    for cache, twin in zip(caches, make_prompt_cache(model), strict=True):
        if not isinstance(twin, (KVCache, RotatingKVCache)):
            assert type(cache) is type(twin)
            continue
        charged.append(cache)
        cache.check_invariants()
        if kind.paged:
            assert type(cache) is PagedKVCache
            assert cache.window == (twin.max_size if isinstance(twin, RotatingKVCache) else None)
        else:
            assert type(cache).__name__ == f"PoolBacked{type(twin).__name__}"
    counted = kvpool.attention_stats().since(before)
    if kind.hooked and ON_GPU:  # pages of fp32 are gathered there
        assert counted.kernel == 0 < counted.total
    elif kind.hooked:
        # Latent attention makes other keys of the latent for a prompt, and those are not ours.
        assert counted.kernel >= 39 * len(charged)
        assert counted.fell_back == {}
        assert name == "deepseek_v3" or counted.not_ours == 0
    else:
        assert counted.total == 0
    charged[-1].release()
    assert all_returned(pool)


@over_kinds
def test_speculative_decoding(kind):
    model, draft = tiny_llama(), tiny_llama(n_layers=2, seed=5)

    def run(cache):
        steps = speculative_generate_step(
            mx.array(PROMPT), model, draft, num_draft_tokens=3, max_tokens=40, prompt_cache=cache
        )
        return [int(token) for token, _, _ in steps]

    pool = make_pool(2048, 4)
    stock = run(make_prompt_cache(model) + make_prompt_cache(draft))
    ours = kind.build(model, pool, 1) + kind.build(draft, pool, 2)
    with kind.attention():
        assert run(ours) == stock
    for cache in ours:
        cache.check_invariants()


@over_kinds
def test_a_second_request_reuses_the_blocks_of_the_first(kind):
    model, other = tiny_llama(), PROMPT[::-1]
    pool = make_pool(2 * 3 * 64, 4)  # 256 tokens a layer and stream, no more
    reused = 0
    for owner, tokens in enumerate((PROMPT, other)):
        caches = kind.build(model, pool, owner)
        with kind.attention():
            found = decode(model, caches, tokens, 48)
        assert found == decode(model, make_prompt_cache(model), tokens, 48)
        reused = pool.stats.n_reused
        if owner == 0:
            caches[0].release()
            assert all_returned(pool)
    assert reused == in_use(pool) == sum(c.n_blocks_held() for c in caches)


@over_kinds
def test_two_requests_side_by_side(kind):
    model, pool = tiny_llama(), make_pool(2048, 4)
    prompts = [PROMPT, PROMPT[:9]]
    with kind.attention():
        streams = [
            generate_step(
                mx.array(tokens), model, max_tokens=20, prompt_cache=kind.build(model, pool, owner)
            )
            for owner, tokens in enumerate(prompts)
        ]
        found = [[int(t) for t, _ in pair] for pair in zip(*streams, strict=True)]
    for i, tokens in enumerate(prompts):
        stock = decode(model, make_prompt_cache(model), tokens, 20)
        assert [pair[i] for pair in found] == stock


@over_kinds
def test_quantising_while_decoding(kind):
    model, pool = tiny_llama(), make_pool(2048, 16)
    if not kind.hooked:
        needs_quantised_attention()
    options = {"kv_bits": 8, "quantized_kv_start": 10}
    caches = kind.build(model, pool)
    with kind.attention():
        tokens = decode(model, caches, PROMPT, 30, **options)
    if kind.paged:
        assert len(tokens) == 30
        assert [type(cache) for cache in caches] == 3 * [PagedKVCache]
    else:
        assert tokens == decode(model, make_prompt_cache(model), PROMPT, 30, **options)
        assert [type(cache).__name__ for cache in caches] == 3 * ["PoolBackedQuantizedKVCache"]
    assert {block.format for block in pool.blocks_for(1)} == {"int8"}
    caches[1].release()
    assert all_returned(pool)
