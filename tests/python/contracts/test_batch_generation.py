"""mlx-lm's batch generation over a pool: the same tokens, and the books of every request."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from cache_kinds import DECODING, PAGED, REQUESTS, all_returned, decode, in_use, make_pool, prompt
from kvpool import BlockPoolExhaustedError
from kvpool.mlx_lm import pool_model
from mlx_lm.generate import BatchGenerator, batch_generate, generation_stream
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from tiny_models import all_models, tiny_deepseek_v3, tiny_gemma3, tiny_lfm2, tiny_llama

over_kinds = pytest.mark.parametrize("kind", DECODING, ids=str)
over_models = pytest.mark.parametrize("make_model", [tiny_llama, tiny_gemma3])

MODELS = {**all_models(), "lfm2": tiny_lfm2}
TOKENIZER = SimpleNamespace(eos_token_ids=[], decode=str)
PROMPTS = [prompt(n, first=n) for n in (21, 9, 40, 1, 3)]
MAX_TOKENS = [10, 30, 5, 24, 16]
# Prompts in chunks, and requests that join and leave a running batch.
SCHEDULES = {
    "at once": {},
    "in chunks": {"prefill_step_size": 8},
    "in turn": {"completion_batch_size": 2, "prefill_batch_size": 1},
}


def in_batch(model, **options):
    prompts = [list(tokens) for tokens in PROMPTS]
    return batch_generate(
        model, TOKENIZER, prompts, max_tokens=MAX_TOKENS, return_token_ids=True, **options
    )


@pytest.fixture(scope="module")
def stock_tokens():
    """What mlx-lm's own caches give, asked once a model and schedule."""
    known = {}

    def tokens(name: str, schedule: str) -> list[list[int]]:
        if (name, schedule) not in known:
            known[name, schedule] = in_batch(MODELS[name](), **SCHEDULES[schedule]).token_ids
        return known[name, schedule]

    return tokens


@over_kinds
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_batches_give_the_tokens_that_stock_gives(name, schedule, kind, stock_tokens):
    model, pool = MODELS[name](), make_pool(8192, 4)
    with kind.pool_model(model, pool), kind.attention():
        ours = in_batch(model, **SCHEDULES[schedule])
    assert ours.token_ids == stock_tokens(name, schedule)
    assert [len(ids) for ids in ours.token_ids] == MAX_TOKENS
    assert all_returned(pool)


@over_kinds
@over_models
def test_extracted_caches_go_on_alone(kind, make_model):
    model, pool = make_model(), make_pool(8192, 4)
    stock = in_batch(model, return_prompt_caches=True)
    with kind.pool_model(model, pool), kind.attention():
        ours = in_batch(model, return_prompt_caches=True)
        owners = [caches[0].owner for caches in ours.caches]
        assert len(set(owners)) == len(PROMPTS)
        held = [sum(cache.n_blocks_held() for cache in caches) for caches in ours.caches]
        mx.synchronize(generation_stream)
        assert [len(pool.blocks_for(owner)) for owner in owners] == held
        assert in_use(pool) == sum(held)  # the batch has gone
        for i, ids in enumerate(stock.token_ids):
            expected = decode(model, stock.caches[i], ids[-1:], 12)
            assert decode(model, ours.caches[i], ids[-1:], 12) == expected
        for caches in ours.caches:
            for cache in caches:
                cache.check_invariants()
            caches[0].release()
    assert all_returned(pool)


@over_kinds
def test_prompts_that_were_kept_are_put_into_a_batch(kind):
    model = tiny_gemma3(window=64)

    def run(make_cache, pool=None):
        kept = LRUPromptCache()
        cache = make_cache()
        model(mx.array([PROMPTS[2][:30]]), cache=cache)
        kept.insert_cache("tiny", PROMPTS[2][:30], cache)
        held = pool and in_use(pool)
        caches, rest = [], []
        for tokens in [PROMPTS[2], PROMPTS[2], *PROMPTS[:2]]:
            found, left = kept.fetch_nearest_cache("tiny", tokens)
            caches.append(found or make_cache())
            rest.append(list(left))
        assert len(rest[0]) == len(rest[1]) == 10
        assert pool is None or in_use(pool) == (1 if kind.paged else 3) * held
        return batch_generate(
            model, TOKENIZER, rest, caches, max_tokens=10, return_token_ids=True
        ).token_ids

    pool = make_pool(8192, 4)
    stock = run(lambda: make_prompt_cache(model))
    with kind.pool_model(model, pool) as pooled, kind.attention():
        assert run(pooled.model.make_cache, pool) == stock
    pool.check_invariants()


@pytest.mark.parametrize("kind", REQUESTS, ids=str)
def test_a_request_that_is_removed_gives_its_blocks_back(kind):
    model, pool = tiny_llama(), make_pool(8192, 4)
    with kind.pool_model(model, pool):
        generator = BatchGenerator(model, max_tokens=50)
        first, second = generator.insert([PROMPTS[0], PROMPTS[1]])
        while not generator.next_generated():
            pass
        both = in_use(pool)
        caches, tokens = generator.remove([first], return_prompt_caches=True)[first]
        assert len(tokens) == caches[0].offset
        kept = sum(cache.n_blocks_held() for cache in caches)
        used = in_use(pool)  # what is extracted from pages shares them
        assert used == both if kind.paged else used < both
        generator.next_generated()
        del caches
        before = in_use(pool)
        assert before >= kept // 3
        generator.remove([second])
        assert all_returned(pool)
        generator.close()


@pytest.mark.parametrize(
    ("kind", "n_pairs"),
    # Both prompts and 11 tokens: of buffers 8 blocks a sequence, layer and stream, the shorter one
    # padded; of pages 8 and 5.
    [(REQUESTS[0], 2 * 3 * 8), (DECODING[2], 3 * (8 + 5))],
    ids=str,
)
def test_running_out_in_mid_batch_changes_no_row_and_can_go_on(kind, n_pairs):
    model = tiny_llama()
    stock = batch_generate(
        model, TOKENIZER, PROMPTS[:2], max_tokens=[24, 24], return_token_ids=True
    ).token_ids
    pool = make_pool(2 * n_pairs, 4)
    with kind.pool_model(model, pool), kind.attention():
        generator = BatchGenerator(model, max_tokens=24)
        uids = generator.insert([list(tokens) for tokens in PROMPTS[:2]])
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


@pytest.mark.parametrize("kind", REQUESTS, ids=str)
def test_a_batch_fits_into_what_its_requests_hold_in_the_end(kind):
    model = tiny_llama()
    prompts, max_tokens = PROMPTS[:2], [11, 11]
    # Up to 32 and 20 rows, padded to 32: 8 blocks a sequence, layer and stream, and no more.
    pool = make_pool(2 * 2 * 3 * 8, 4)
    stock = batch_generate(model, TOKENIZER, prompts, max_tokens=max_tokens, return_token_ids=True)
    with kind.pool_model(model, pool):
        ours = batch_generate(
            model,
            TOKENIZER,
            [list(tokens) for tokens in prompts],
            max_tokens=max_tokens,
            return_token_ids=True,
            prefill_batch_size=1,
        )
    assert ours.token_ids == stock.token_ids
    # Pages are not padded.
    assert pool.stats.peak_blocks_in_use == 2 * 3 * ((8 + 5) if kind.paged else (8 + 8))
    assert pool.stats.n_exhausted == 0
    assert all_returned(pool)


# --- pool_model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REQUESTS, ids=str)
@pytest.mark.parametrize("make_model", [tiny_llama, tiny_deepseek_v3])
def test_pooling_a_model_is_taken_back(kind, make_model):
    model = make_model()
    before = [type(cache) for cache in make_prompt_cache(model)]
    one, two = make_pool(), make_pool()
    outer = kind.pool_model(model, one)
    with kind.pool_model(model, two):
        first, second = make_prompt_cache(model), make_prompt_cache(model)
        assert {cache.pool for cache in first} == {two}
        assert {type(cache) for cache in first} == {kind.cls}
        assert kind.paged or first[0].step == 4
        assert first[0].owner == first[1].owner != second[0].owner
        with pytest.raises(RuntimeError, match=r"\[PooledModel::undo\]"):
            outer.undo()
    assert {cache.pool for cache in make_prompt_cache(model)} == {one}
    outer.undo()
    assert [type(cache) for cache in make_prompt_cache(model)] == before
    with pytest.raises(RuntimeError):
        outer.undo()


def test_pooling_checks_what_it_is_given():
    model, pool = tiny_llama(), make_pool()
    with pytest.raises(TypeError, match=r"\[pool_model\] pool must be a BlockPoolAllocator"):
        pool_model(model, 4096)
    for options, error, message in (
        ({"step": 2.5}, TypeError, r"\[pool_model\] step must be an int, got 2.5"),
        ({"format": "int8"}, TypeError, r"\[pool_model\] format need"),
        ({"paged": True, "step": 4}, TypeError, r"\[pool_model\] paged caches have no step, got 4"),
        ({"paged": True, "format": "fp9"}, ValueError, "format"),
    ):
        with pytest.raises(error, match=message):
            pool_model(model, pool, **options)
        assert "make_cache" not in vars(model)
    with pool_model(model, pool, paged=True, format="int8") as pooled:
        assert [type(cache) for cache in pooled.model.make_cache()] == 3 * [PAGED.cls]
    assert in_use(pool) == 0
