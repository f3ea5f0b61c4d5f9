"""Paged caches give the tokens that mlx-lm's own caches give, with and without the hook."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import kvpool
import mlx.core as mx
import pytest
from kvpool import BlockPoolAllocator, PoolConfig, build_paged_caches
from kvpool.cache import METHODS
from kvpool.mlx_lm.paged import PagedKVCache
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from tiny_models import VOCABULARY, all_models, tiny_gpt2, tiny_lfm2, tiny_llama, tiny_qwen3

PROMPT = [(7 * i + 3) % VOCABULARY for i in range(21)]
MODELS = {**all_models(), "qwen3": tiny_qwen3, "gpt2": tiny_gpt2, "lfm2": tiny_lfm2}

#: Two logits that are closer than this may change places when arithmetic in half precision is
#: ordered otherwise; the tiny models' logits are of the size of 1 to 10.
HALF_TOLERANCE = 0.1


def make_pool(n_blocks: int = 2048, block_size: int = 4) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=n_blocks))


def decode(model, cache, prompt=PROMPT, max_tokens=40, **options):
    steps = generate_step(
        mx.array(prompt), model, max_tokens=max_tokens, prompt_cache=cache, **options
    )
    return [int(token) for token, _ in steps]


def hook(hooked: bool):
    return kvpool.attention() if hooked else nullcontext()


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_decoding_with_a_prompt_in_chunks(name, block_size, hooked):
    model = MODELS[name]()
    stock = decode(model, make_prompt_cache(model), prefill_step_size=8)
    pool = make_pool(block_size=block_size)
    caches = build_paged_caches(model, pool, owner=1)
    before = kvpool.attention_stats()
    with hook(hooked):
        assert decode(model, caches, prefill_step_size=8) == stock
    for cache, twin in zip(caches, make_prompt_cache(model), strict=True):
        if not isinstance(twin, (KVCache, RotatingKVCache)):
            assert type(cache) is type(twin)
            continue
        cache.check_invariants()
        assert type(cache) is PagedKVCache
        assert cache.window == (twin.max_size if isinstance(twin, RotatingKVCache) else None)
    paged = [cache for cache in caches if isinstance(cache, PagedKVCache)]
    counted = kvpool.attention_stats().since(before)
    if hooked:
        # Latent attention makes other keys of the latent for a prompt, and those are not ours.
        assert counted.kernel >= 39 * len(paged)
        assert counted.fell_back == {}
        assert name == "deepseek_v3" or counted.not_ours == 0
    else:
        assert counted.total == 0
    paged[-1].release()
    mx.synchronize(generation_stream)  # mlx-lm computes one token that it never delivers
    assert pool.stats.blocks_in_use() == 0
    pool.check_invariants()


# MLX gathers the experts of gpt_oss in fp32 alone on the CPU.
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"gpt_oss"}))
def test_half_precision_agrees_until_a_step_that_is_a_close_call(name, dtype):
    model = copy.deepcopy(MODELS[name]())
    model.set_dtype(dtype)

    def run(cache):
        steps = generate_step(mx.array(PROMPT), model, max_tokens=30, prompt_cache=cache)
        return [(int(token), logprobs) for token, logprobs in steps]

    stock = run(make_prompt_cache(model))
    with kvpool.attention():
        ours = run(build_paged_caches(model, make_pool(), 1))
    for (token, logprobs), (mine, _) in zip(stock, ours, strict=True):
        if token != mine:
            best, second = mx.sort(-logprobs.astype(mx.float32))[:2].tolist()
            assert second - best < HALF_TOLERANCE
            return


def test_speculative_decoding():
    model, draft = tiny_llama(), tiny_llama(n_layers=2, seed=5)

    def run(cache):
        steps = speculative_generate_step(
            mx.array(PROMPT), model, draft, num_draft_tokens=3, max_tokens=40, prompt_cache=cache
        )
        return [int(token) for token, _, _ in steps]

    pool = make_pool()
    stock = run(make_prompt_cache(model) + make_prompt_cache(draft))
    with kvpool.attention():
        paged = build_paged_caches(model, pool, 1) + build_paged_caches(draft, pool, 2)
        assert run(paged) == stock
    for cache in paged:
        cache.check_invariants()


def test_two_requests_side_by_side():
    model = tiny_llama()
    pool = make_pool()
    prompts = [PROMPT, PROMPT[:9]]
    with kvpool.attention():
        streams = [
            generate_step(
                mx.array(prompt),
                model,
                max_tokens=20,
                prompt_cache=build_paged_caches(model, pool, owner),
            )
            for owner, prompt in enumerate(prompts)
        ]
        tokens = [[int(t) for t, _ in pair] for pair in zip(*streams, strict=True)]
    for i, prompt in enumerate(prompts):
        stock = decode(model, make_prompt_cache(model), prompt, max_tokens=20)
        assert [pair[i] for pair in tokens] == stock


def test_forks_of_one_prompt_go_their_own_ways():
    model = tiny_llama()
    pool = make_pool(block_size=16)
    caches = build_paged_caches(model, pool, 1)
    with kvpool.attention():
        mx.eval(model(mx.array([PROMPT]), cache=caches))
        held = pool.stats.blocks_in_use()
        forks = [copy.deepcopy(caches) for _ in range(3)]
        assert pool.stats.blocks_in_use() == held
        assert len({fork[0].owner for fork in forks}) == 3
        assert all(len({cache.owner for cache in fork}) == 1 for fork in forks)
        ours = [decode(model, fork, [token], 10) for token, fork in enumerate(forks)]
    for token, tokens in enumerate(ours):
        stock = make_prompt_cache(model)
        mx.eval(model(mx.array([PROMPT]), cache=stock))
        assert tokens == decode(model, stock, [token], 10)
    forks[0][0].release()
    assert {cache.offset for cache in forks[1]} == {stock[0].offset}


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_narrow_pages_answer_much_as_exact_ones_do(format):
    model = tiny_llama()
    pool = make_pool(block_size=16)
    exact = make_prompt_cache(model)
    narrow = build_paged_caches(model, pool, 1, format=format)
    tokens = mx.array([PROMPT])
    with kvpool.attention():
        ours = model(tokens, cache=narrow)
    stock = model(tokens, cache=exact)
    assert cosine(ours, stock) > (0.999 if format == "int8" else 0.9)
    assert sum(c.nbytes for c in narrow) < sum(c.nbytes for c in exact)


@pytest.mark.parametrize("method", METHODS)
def test_methods_keep_full_blocks_in_codes(method):
    model, pool = tiny_llama(), make_pool(block_size=32)
    tokens = mx.array([[(5 * i + i * i) % VOCABULARY for i in range(200)]])
    answers = []
    for owner, hooked in enumerate((True, False)):
        caches = build_paged_caches(model, pool, owner, method=method, bits=4)
        before = kvpool.attention_stats()
        with hook(hooked):
            mx.eval(model(tokens[:, :-1], cache=caches))
            answers.append(model(tokens[:, -1:], cache=caches))
            mx.eval(answers)
        counted = kvpool.attention_stats().since(before)
        assert (counted.kernel, counted.total) == ((6, 6) if hooked else (0, 0))
        assert len({block.format for block in pool.blocks_for(owner)}) >= 2
        assert sum(c.nbytes for c in caches) < 0.9 * 3 * 2 * 224 * 2 * 64 * 4
        caches[0].check_invariants()
    assert cosine(*answers) > 0.9999, "the kernels read codes otherwise than they are decoded"
    if method in ("turboquant_mse", "kivi"):
        exact = make_prompt_cache(model)
        model(tokens[:, :-1], cache=exact)
        assert cosine(answers[0], model(tokens[:, -1:], cache=exact)) > 0.8


def cosine(a: mx.array, b: mx.array) -> float:
    return (mx.sum(a * b) / mx.sqrt(mx.sum(a * a) * mx.sum(b * b))).item()


def test_kivi_pages_hold_whole_groups():
    with pytest.raises(ValueError, match="32"):
        build_paged_caches(tiny_llama(), make_pool(block_size=16), 1, method="kivi", bits=2)


def test_quantising_while_decoding():
    model = tiny_llama()
    pool = make_pool(block_size=16)
    caches = build_paged_caches(model, pool, owner=1)
    with kvpool.attention():
        tokens = decode(model, caches, kv_bits=8, quantized_kv_start=10, max_tokens=30)
    assert len(tokens) == 30
    assert [type(cache) for cache in caches] == 3 * [PagedKVCache]
    assert {block.format for block in pool.blocks_for(1)} == {"int8"}
    caches[1].release()
    mx.synchronize(generation_stream)
    assert pool.stats.blocks_in_use() == 0
