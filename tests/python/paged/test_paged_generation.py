"""mlx-lm's batches, kept prompts, files and server over paged caches."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import kvpool
import mlx.core as mx
import pytest
from kvpool import (
    BlockPoolAllocator,
    BlockPoolExhaustedError,
    PoolConfig,
    build_paged_caches,
    load_prompt_cache,
    save_prompt_cache,
)
from kvpool.core.exceptions import PromptCacheError
from kvpool.mlx_lm import pool_model
from kvpool.mlx_lm.paged import PagedKVCache
from mlx_lm.generate import BatchGenerator, batch_generate, generate_step, generation_stream
from mlx_lm.models import cache as stock_cache
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache, trim_prompt_cache
from tiny_models import VOCABULARY, all_models, tiny_gemma3, tiny_lfm2, tiny_llama

MODELS = {**all_models(), "lfm2": tiny_lfm2}
TOKENIZER = SimpleNamespace(eos_token_ids=[], decode=str)
PROMPTS = [[(7 * i + n) % VOCABULARY for i in range(n)] for n in (21, 9, 40, 1, 3)]
MAX_TOKENS = [10, 30, 5, 24, 16]
SCHEDULES = {
    "at once": {},
    "in chunks": {"prefill_step_size": 8},
    "in turn": {"completion_batch_size": 2, "prefill_batch_size": 1},
}


def make_pool(n_blocks: int = 8192, block_size: int = 4) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=n_blocks))


def check_returned(pool) -> None:
    mx.synchronize(generation_stream)  # mlx-lm computes one token that it never delivers
    assert pool.stats.blocks_in_use() == 0
    pool.check_invariants()


def in_batch(model, **options):
    prompts = [list(prompt) for prompt in PROMPTS]
    return batch_generate(
        model, TOKENIZER, prompts, max_tokens=MAX_TOKENS, return_token_ids=True, **options
    )


def go_on(model, cache, token: int, n_tokens: int = 12) -> list[int]:
    steps = generate_step(mx.array([token]), model, max_tokens=n_tokens, prompt_cache=cache)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_batches_give_the_tokens_that_stock_gives(name, schedule, hooked):
    model, options = MODELS[name](), SCHEDULES[schedule]
    stock = in_batch(model, **options)
    pool = make_pool()
    with pool_model(model, pool, paged=True), kvpool.attention() if hooked else nullcontext():
        paged = in_batch(model, **options)
    assert paged.token_ids == stock.token_ids
    check_returned(pool)


@pytest.mark.parametrize("model", [tiny_llama(), tiny_gemma3()], ids=["llama", "gemma3"])
def test_extracted_caches_go_on_alone(model):
    stock = in_batch(model, return_prompt_caches=True)
    pool = make_pool()
    with pool_model(model, pool, paged=True), kvpool.attention():
        paged = in_batch(model, return_prompt_caches=True)
        owners = [caches[0].owner for caches in paged.caches]
        assert len(set(owners)) == len(PROMPTS)
        held = [sum(cache.n_blocks_held() for cache in caches) for caches in paged.caches]
        mx.synchronize(generation_stream)
        assert pool.stats.blocks_in_use() == sum(held)  # the batch has gone
        for i, ids in enumerate(stock.token_ids):
            expected = go_on(model, stock.caches[i], ids[-1])
            assert go_on(model, paged.caches[i], ids[-1]) == expected
        for caches in paged.caches:
            caches[0].check_invariants()
            caches[0].release()
    check_returned(pool)


def test_prompts_that_are_kept_share_their_blocks():
    model = tiny_gemma3(window=64)

    def run(make_cache, pool=None):
        kept = LRUPromptCache()
        cache = make_cache()
        model(mx.array([PROMPTS[2][:30]]), cache=cache)
        kept.insert_cache("tiny", PROMPTS[2][:30], cache)
        held = pool and pool.stats.blocks_in_use()
        caches, rest = [], []
        for prompt in [PROMPTS[2], PROMPTS[2], *PROMPTS[:2]]:
            found, left = kept.fetch_nearest_cache("tiny", prompt)
            caches.append(found or make_cache())
            rest.append(list(left))
        assert len(rest[0]) == len(rest[1]) == 10
        assert pool is None or pool.stats.blocks_in_use() == held
        return batch_generate(
            model, TOKENIZER, rest, caches, max_tokens=10, return_token_ids=True
        ).token_ids

    pool = make_pool()
    stock = run(lambda: make_prompt_cache(model))
    with pool_model(model, pool, paged=True) as pooled, kvpool.attention():
        assert run(pooled.model.make_cache, pool) == stock
    pool.check_invariants()


def test_running_out_in_mid_batch_changes_no_row_and_can_go_on():
    model = tiny_llama()
    stock = batch_generate(
        model, TOKENIZER, PROMPTS[:2], max_tokens=[24, 24], return_token_ids=True
    ).token_ids
    # The first prompt and 11 tokens: 8 blocks a layer and stream; the second: 5.
    pool = make_pool(n_blocks=2 * 3 * (8 + 5))
    with pool_model(model, pool, paged=True), kvpool.attention():
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
        n_done = len(out[uids[1]])
        generator.remove([uids[0]])
        while len(out[uids[1]]) < 24:
            step()
        generator.close()
    assert out[uids[0]] == stock[0][:n_done]
    assert out[uids[1]] == stock[1]
    pool.check_invariants()


def test_exhaustion_in_mid_generation_and_going_on():
    """The recipe: make room, trim the token that was never delivered, feed the last one again."""
    model, prompt = tiny_llama(), PROMPTS[0]
    steps = generate_step(mx.array(prompt), model, max_tokens=24)
    stock = [int(token) for token, _ in steps]
    pool = make_pool(n_blocks=2 * 3 * 9)
    other = build_paged_caches(model, pool, 2)
    model(mx.array([[5, 6]]), cache=other)
    caches = build_paged_caches(model, pool, 1)
    tokens = []
    with kvpool.attention():
        with pytest.raises(BlockPoolExhaustedError, match=r"\d+ tokens? fit"):
            for token, _ in generate_step(
                mx.array(prompt), model, max_tokens=24, prompt_cache=caches
            ):
                tokens.append(int(token))
        assert len({cache.offset for cache in caches}) == 1
        other[0].release()
        pool_room = pool.n_free("k")
        assert pool_room == 3
        trim_prompt_cache(caches, 1)
        rest = len(stock) - len(tokens)
        for token, _ in generate_step(
            mx.array(tokens[-1:]), model, max_tokens=min(rest, 4), prompt_cache=caches
        ):
            tokens.append(int(token))
    assert tokens == stock[: len(tokens)] and len(tokens) > 8


def test_an_exception_between_layers_is_taken_back():
    model = tiny_llama()
    pool = make_pool()
    caches = build_paged_caches(model, pool, 1)
    stock = make_prompt_cache(model)
    for cache in (caches, stock):
        mx.eval(model(mx.array([PROMPTS[0]]), cache=cache))
    held = pool.stats.blocks_in_use()
    data = mx.zeros((1, 2, 9, 64))
    caches[0].update_and_fetch(data, data)  # and then the layers that follow were interrupted
    with kvpool.attention():
        assert go_on(model, caches, 5) == go_on(model, stock, 5)
        mx.synchronize(generation_stream)
    assert {cache.offset for cache in caches} == {stock[0].offset}
    caches[0].update_and_fetch(data, data)
    assert trim_prompt_cache(caches, stock[0].offset - 21) == stock[0].offset - 21
    assert {cache.offset for cache in caches} == {21}
    assert pool.stats.blocks_in_use() == held


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [tiny_llama(), tiny_gemma3()], ids=["llama", "gemma3"])
def test_a_prompt_goes_through_a_file(model, tmp_path):
    file = tmp_path / "prompt.safetensors"
    pool = make_pool()
    caches = build_paged_caches(model, pool, 1)
    stock = make_prompt_cache(model)
    for cache in (caches, stock):
        mx.eval(model(mx.array([PROMPTS[2]]), cache=cache))
    save_prompt_cache(file, caches, {"name": "tiny"})
    expected = go_on(model, stock, 5)
    other = make_pool()
    loaded, metadata = load_prompt_cache(file, other, 7, model=model, return_metadata=True)
    assert metadata == {"name": "tiny"}
    assert [type(cache) for cache in loaded] == len(caches) * [PagedKVCache]
    assert [cache.window for cache in loaded] == [cache.window for cache in caches]
    assert {cache.owner for cache in loaded} == {7}
    with kvpool.attention():
        assert go_on(model, loaded, 5) == expected
        assert go_on(model, caches, 5) == expected
    loaded[0].release()
    assert other.stats.blocks_in_use() == 0


def test_formats_go_through_a_file(tmp_path):
    file = tmp_path / "prompt.safetensors"
    model, pool = tiny_llama(), make_pool(block_size=16)
    caches = build_paged_caches(model, pool, 1, age_policy="fp16:16,int8")
    mx.eval(model(mx.array([PROMPTS[2]]), cache=caches))
    model(mx.array([[5]]), cache=caches)
    save_prompt_cache(file, caches)
    loaded = load_prompt_cache(file, make_pool(block_size=16))
    assert loaded[0]._format == caches[0]._format
    near = mx.max(mx.abs(loaded[0].keys - caches[0].keys)).item()
    assert near < 0.1
    with pytest.raises(PromptCacheError, match="block_size"):
        load_prompt_cache(file, make_pool(block_size=8))


def test_a_file_that_does_not_fit_leaves_the_pool_alone(tmp_path):
    file = tmp_path / "prompt.safetensors"
    model = tiny_llama()
    caches = build_paged_caches(model, make_pool(), 1)
    mx.eval(model(mx.array([PROMPTS[2]]), cache=caches))
    save_prompt_cache(file, caches)
    small = make_pool(n_blocks=30)
    with pytest.raises(BlockPoolExhaustedError):
        load_prompt_cache(file, small)
    assert small.stats.blocks_in_use() == 0
    with pytest.raises(PromptCacheError, match="does not fit the model"):
        load_prompt_cache(file, small, model=tiny_gemma3())


def test_mlx_lms_own_save_refuses_paged_caches(tmp_path):
    model = tiny_llama()
    caches = build_paged_caches(model, make_pool(), 1)
    mx.eval(model(mx.array([PROMPTS[2]]), cache=caches))
    with pytest.raises(ValueError, match="not serializable"):
        stock_cache.save_prompt_cache(str(tmp_path / "prompt.safetensors"), caches)


# --- pool_model -----------------------------------------------------------------------------------


def test_pool_model_checks_the_options_of_paged_caches():
    model, pool = tiny_llama(), make_pool()
    for options, error, name in (
        ({"format": "int8"}, TypeError, "format"),
        ({"paged": True, "step": 4}, TypeError, "step"),
        ({"paged": True, "format": "fp9"}, ValueError, "format"),
    ):
        with pytest.raises(error, match=name):
            pool_model(model, pool, **options)
    with pool_model(model, pool, paged=True, format="int8") as pooled:
        assert [type(cache) for cache in pooled.model.make_cache()] == 3 * [PagedKVCache]
    assert pool.stats.blocks_in_use() == 0
