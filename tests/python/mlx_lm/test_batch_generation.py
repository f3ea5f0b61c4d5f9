"""mlx-lm's batch generation over a pool: the same tokens, and the books of every request."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from kvpool import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm import pool_model
from mlx_lm.generate import BatchGenerator, batch_generate, generate_step
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from tiny_models import VOCABULARY, all_models, tiny_deepseek_v3, tiny_gemma3, tiny_llama

TOKENIZER = SimpleNamespace(eos_token_ids=[], decode=str)
PROMPTS = [[(7 * i + n) % VOCABULARY for i in range(n)] for n in (21, 9, 40, 1, 3)]
MAX_TOKENS = [10, 30, 5, 24, 16]
# Prompts in chunks, and requests that join and leave a running batch.
SCHEDULES = {
    "at once": {},
    "in chunks": {"prefill_step_size": 8},
    "in turn": {"completion_batch_size": 2, "prefill_batch_size": 1},
}


def make_pool(n_blocks: int = 8192, **options) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=n_blocks, **options))


def in_batch(model, **options):
    prompts = [list(prompt) for prompt in PROMPTS]
    return batch_generate(
        model, TOKENIZER, prompts, max_tokens=MAX_TOKENS, return_token_ids=True, **options
    )


def go_on(model, cache, token: int, n_tokens: int = 12) -> list[int]:
    steps = generate_step(mx.array([token]), model, max_tokens=n_tokens, prompt_cache=cache)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", all_models())
def test_batches_give_the_tokens_that_stock_gives(name, schedule):
    model, options = all_models()[name](), SCHEDULES[schedule]
    stock = in_batch(model, **options)
    pool = make_pool()
    with pool_model(model, pool):
        pooled = in_batch(model, **options)
    assert pooled.token_ids == stock.token_ids
    assert [len(ids) for ids in pooled.token_ids] == MAX_TOKENS
    assert pool.stats.blocks_in_use() == 0
    pool.check_invariants()


@pytest.mark.parametrize("model", [tiny_llama(), tiny_gemma3()], ids=["llama", "gemma3"])
def test_extracted_caches_go_on_alone(model):
    stock = in_batch(model, return_prompt_caches=True)
    pool = make_pool()
    with pool_model(model, pool):
        pooled = in_batch(model, return_prompt_caches=True)
    owners = [caches[0].owner for caches in pooled.caches]
    assert len(set(owners)) == len(PROMPTS)
    held = [sum(cache.n_blocks_held() for cache in caches) for caches in pooled.caches]
    assert [len(pool.blocks_for(owner)) for owner in owners] == held
    assert pool.stats.blocks_in_use() == sum(held)  # the batch has gone
    for i, ids in enumerate(stock.token_ids):
        expected = go_on(model, stock.caches[i], ids[-1])
        assert go_on(model, pooled.caches[i], ids[-1]) == expected
    for caches in pooled.caches:
        for cache in caches:
            cache.check_invariants()
        caches[0].release()
    assert pool.stats.blocks_in_use() == 0
    pool.check_invariants()


def test_prompts_that_were_kept_are_put_into_a_batch():
    model = tiny_gemma3()

    def run(make_cache):
        kept = LRUPromptCache()
        cache = make_cache()
        model(mx.array([PROMPTS[2][:30]]), cache=cache)
        kept.insert_cache("tiny", PROMPTS[2][:30], cache)
        caches, rest = [], []
        for prompt in PROMPTS:
            found, left = kept.fetch_nearest_cache("tiny", prompt)
            caches.append(found or make_cache())
            rest.append(list(left))
        assert len(rest[2]) == 10
        return batch_generate(
            model, TOKENIZER, rest, caches, max_tokens=MAX_TOKENS, return_token_ids=True
        ).token_ids

    pool = make_pool()
    stock = run(lambda: make_prompt_cache(model))
    with pool_model(model, pool) as pooled:
        assert run(pooled.model.make_cache) == stock
    pool.check_invariants()


def test_a_request_that_is_removed_gives_its_blocks_back():
    model, pool = tiny_llama(), make_pool()
    with pool_model(model, pool, step=4):
        generator = BatchGenerator(model, max_tokens=50)
        first, second = generator.insert([PROMPTS[0], PROMPTS[1]])
        while not generator.next_generated():
            pass
        both = pool.stats.blocks_in_use()
        caches, tokens = generator.remove([first], return_prompt_caches=True)[first]
        assert len(tokens) == caches[0].offset
        kept = sum(cache.n_blocks_held() for cache in caches)
        assert pool.stats.blocks_in_use() < both
        generator.next_generated()
        del caches
        before = pool.stats.blocks_in_use()
        assert before >= kept // 3
        generator.remove([second])
        assert pool.stats.blocks_in_use() == 0
        generator.close()
    pool.check_invariants()


def test_running_out_in_mid_batch_changes_no_row_and_can_go_on():
    model = tiny_llama()
    stock = batch_generate(
        model, TOKENIZER, PROMPTS[:2], max_tokens=[24, 24], return_token_ids=True
    ).token_ids
    # Both prompts and 11 tokens: 8 blocks a sequence, layer and stream.
    pool = make_pool(n_blocks=2 * 2 * 3 * 8)
    with pool_model(model, pool, step=4):
        generator = BatchGenerator(model, max_tokens=24)
        uids = generator.insert([list(prompt) for prompt in PROMPTS[:2]])
        out = {uid: [] for uid in uids}

        def step() -> None:
            for response in generator.next_generated():
                out[response.uid].append(response.token)

        with pytest.raises(BlockPoolExhaustedError, match="0 tokens fit"):
            while True:
                step()
        pool.check_invariants()
        assert 4 < len(out[uids[0]]) < 24
        batch = generator._generation_batch.prompt_cache
        assert len({tuple(cache.offset.tolist()) for cache in batch}) == 1
        for cache in batch:
            cache.check_invariants()
        n_done = len(out[uids[1]])
        generator.remove([uids[0]])
        while len(out[uids[1]]) < 24:
            step()
        generator.close()
    # mlx-lm computes a token ahead: the one under way when the pool ran out is not lost.
    assert out[uids[0]] == stock[0][:n_done]
    assert out[uids[1]] == stock[1]
    pool.check_invariants()


def test_a_batch_fits_into_what_its_requests_hold_in_the_end():
    model = tiny_llama()
    prompts, max_tokens = PROMPTS[:2], [11, 11]
    # Up to 32 and 20 rows, padded to 32: 8 blocks a sequence, layer and stream, and no more.
    pool = make_pool(n_blocks=2 * 2 * 3 * 8)
    stock = batch_generate(model, TOKENIZER, prompts, max_tokens=max_tokens, return_token_ids=True)
    with pool_model(model, pool, step=4):
        pooled = batch_generate(
            model,
            TOKENIZER,
            [list(prompt) for prompt in prompts],
            max_tokens=max_tokens,
            return_token_ids=True,
            prefill_batch_size=1,
        )
    assert pooled.token_ids == stock.token_ids
    assert pool.stats.peak_blocks_in_use == 2 * 2 * 3 * 8
    assert pool.stats.n_exhausted == 0
    assert pool.stats.blocks_in_use() == 0


@pytest.mark.parametrize("model", [tiny_llama(), tiny_deepseek_v3()], ids=["own", "default"])
def test_pooling_a_model_is_taken_back(model):
    before = [type(cache) for cache in make_prompt_cache(model)]
    one, two = make_pool(), make_pool()
    outer = pool_model(model, one)
    with pool_model(model, two, step=8):
        first, second = make_prompt_cache(model), make_prompt_cache(model)
        assert {cache.pool for cache in first} == {two}
        assert first[0].step == 8
        assert first[0].owner == first[1].owner != second[0].owner
        with pytest.raises(RuntimeError, match=r"\[PooledModel::undo\]"):
            outer.undo()
    assert {cache.pool for cache in make_prompt_cache(model)} == {one}
    outer.undo()
    assert [type(cache) for cache in make_prompt_cache(model)] == before
    with pytest.raises(RuntimeError):
        outer.undo()


def test_pooling_refuses_what_is_no_pool():
    model = tiny_llama()
    with pytest.raises(TypeError, match=r"\[pool_model\] pool must be a BlockPoolAllocator"):
        pool_model(model, 4096)
    with pytest.raises(TypeError, match=r"\[pool_model\] step must be an int, got 2.5"):
        pool_model(model, make_pool(), step=2.5)
    assert "make_cache" not in vars(model)
