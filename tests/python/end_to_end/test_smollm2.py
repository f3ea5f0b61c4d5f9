"""SmolLM2-135M through the pool: the tokens of mlx-lm's own caches, in every way to use it."""

from __future__ import annotations

import gc

import kvpool
import mlx.core as mx
import mlx_lm
import pytest
from cache_kinds import ON_GPU, all_returned
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory import BlockPoolAllocator, PoolConfig, build_pooled_caches
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import trim_prompt_cache
from stock import SMOLLM2_TOKENS, decode


def pool_for(model, max_tokens, **options) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig.for_model(model, max_tokens=max_tokens, **options))


def check_returned(pool) -> None:
    assert pool.stats.blocks_in_use() == 0
    pool.check_invariants()


def test_greedy_decoding_is_identical_through_300_tokens(smollm2, smollm2_prompt, smollm2_stock):
    model, _ = smollm2
    pool = pool_for(model, len(smollm2_prompt) + SMOLLM2_TOKENS)
    caches = build_pooled_caches(model, pool, owner=1)
    tokens = decode(model, smollm2_prompt, SMOLLM2_TOKENS, caches)
    for cache in caches:
        cache.check_invariants()
    caches[0].release()
    check_returned(pool)
    assert tokens == smollm2_stock.result()
    assert len(set(tokens)) > 60  # a story, not one word again and again


def test_paged_caches_give_the_same_tokens(smollm2, smollm2_prompt, smollm2_stock):
    model, _ = smollm2
    n_tokens = 60
    pool = pool_for(model, len(smollm2_prompt) + n_tokens)
    caches = kvpool.build_paged_caches(model, pool, owner=1)
    before = kvpool.attention_stats()
    with kvpool.attention():
        tokens = decode(model, smollm2_prompt, n_tokens, caches)
    answered = kvpool.attention_stats().since(before)
    assert answered.total >= 30 * n_tokens
    assert answered.kernel == (0 if ON_GPU else answered.total)  # a GPU gathers pages of fp32
    assert tokens == smollm2_stock.result()[:n_tokens]
    caches[0].check_invariants()
    caches[0].release()
    assert all_returned(pool)


def test_paged_caches_give_the_same_tokens_without_the_hook(smollm2, smollm2_prompt, smollm2_stock):
    model, _ = smollm2
    pool = pool_for(model, len(smollm2_prompt) + 12)
    caches = kvpool.build_paged_caches(model, pool, owner=1)
    assert decode(model, smollm2_prompt, 12, caches) == smollm2_stock.result()[:12]


def test_it_answers_sensibly(smollm2):
    model, tokenizer = smollm2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    pool = pool_for(model, len(prompt) + 12)
    caches = build_pooled_caches(model, pool, owner=1)
    answer = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12, prompt_cache=caches)
    assert "Paris" in answer


def test_a_second_request_reuses_the_blocks_of_the_first(smollm2, smollm2_prompt, smollm2_stock):
    model, _ = smollm2
    pool = pool_for(model, len(smollm2_prompt) + 8)
    for owner in (1, 2):
        before = pool.stats.snapshot()
        caches = build_pooled_caches(model, pool, owner)
        tokens = decode(model, smollm2_prompt, 8, caches)
        taken = pool.stats.n_allocations - before.n_allocations
        reused = pool.stats.n_reused - before.n_reused
        caches[0].release()
        assert tokens == smollm2_stock.result()[:8]
        assert taken > 0
        assert reused == (taken if owner == 2 else 0)
    check_returned(pool)


def test_speculative_decoding_as_its_own_draft(smollm2, smollm2_prompt, smollm2_stock):
    model, _ = smollm2
    n_tokens, n_draft = 12, 3
    pool = pool_for(model, len(smollm2_prompt) + n_tokens + n_draft, n_sequences=2)
    # The pool has just enough blocks: what one cache had to spare, the other would lack.
    step = pool.config.block_size
    caches = [
        cache for owner in (1, 2) for cache in build_pooled_caches(model, pool, owner, step=step)
    ]
    steps = speculative_generate_step(
        mx.array(smollm2_prompt),
        model,
        model,
        num_draft_tokens=n_draft,
        max_tokens=n_tokens,
        prompt_cache=caches,
    )
    made = [(int(token), from_draft) for token, _, from_draft in steps]
    assert [token for token, _ in made] == smollm2_stock.result()[:n_tokens]
    assert any(from_draft for _, from_draft in made)
    for owner in (1, 2):
        pool.free_all(owner)
    check_returned(pool)


def test_a_batch_of_requests_of_unequal_length(smollm2, smollm2_prompt):
    """Stock batches are the reference: padding rounds otherwise than a request alone."""
    model, tokenizer = smollm2
    prompts = [smollm2_prompt[:20], smollm2_prompt[:11], smollm2_prompt[3:8]]
    wanted = [4, 7, 2]
    longest = max(len(prompt) + n for prompt, n in zip(prompts, wanted, strict=True))
    pool = pool_for(model, longest, n_sequences=2 * len(prompts))

    def batch(caches):
        return mlx_lm.batch_generate(
            model,
            tokenizer,
            prompts,
            prompt_caches=caches,
            max_tokens=wanted,
            return_token_ids=True,
        ).token_ids

    stock = batch(None)
    assert [len(tokens) for tokens in stock] == wanted
    assert batch([build_pooled_caches(model, pool, owner) for owner in (1, 2, 3)]) == stock
    assert pool.stats.peak_blocks_in_use > 0
    gc.collect()
    check_returned(pool)


def test_exhaustion_in_mid_generation_and_going_on(smollm2, smollm2_prompt, smollm2_stock):
    """The recipe: make room, trim the token that was never delivered, feed the last one again."""
    model, _ = smollm2
    pool = pool_for(model, len(smollm2_prompt) + 10, block_size=8)
    other = pool.new_owner()
    n_blocks = pool.stats.n_blocks
    pool.allocate_kv(8, owner=other)  # one pair of blocks is another request's

    caches = build_pooled_caches(model, pool, owner=1)
    delivered: list[int] = []
    with pytest.raises(BlockPoolExhaustedError, match=r"\d+ tokens? fit"):
        steps = generate_step(mx.array(smollm2_prompt), model, max_tokens=20, prompt_cache=caches)
        for token, _ in steps:
            delivered.append(int(token))
    assert 0 < len(delivered) < 10
    assert len({cache.offset for cache in caches}) == 1
    for cache in caches:
        cache.check_invariants()

    pool.free_all(other)
    assert pool.stats.n_blocks == n_blocks
    assert trim_prompt_cache(caches, 1) == 1
    assert caches[0].offset == len(smollm2_prompt) + len(delivered) - 1
    more = decode(model, delivered[-1:], 9 - len(delivered), caches)
    assert delivered + more == smollm2_stock.result()[:9]
    caches[0].release()
    check_returned(pool)
