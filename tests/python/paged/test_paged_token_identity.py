"""Paged caches beside mlx-lm's own in half precision, in narrow pages and in codes."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import kvpool
import mlx.core as mx
import pytest
from cache_kinds import decode, in_use, make_pool, needs_method_kernels, prompt
from kvpool import build_paged_caches
from kvpool.cache import METHODS
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import VOCABULARY, all_models, tiny_gpt2, tiny_lfm2, tiny_llama, tiny_qwen3

PROMPT = prompt(21)
MODELS = {**all_models(), "qwen3": tiny_qwen3, "gpt2": tiny_gpt2, "lfm2": tiny_lfm2}

#: Two logits that are closer than this may change places when arithmetic in half precision is
#: ordered otherwise; the tiny models' logits are of the size of 1 to 10.
HALF_TOLERANCE = 0.1


def hook(hooked: bool):
    return kvpool.attention() if hooked else nullcontext()


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
        ours = run(build_paged_caches(model, make_pool(2048, 4), 1))
    for (token, logprobs), (mine, _) in zip(stock, ours, strict=True):
        if token != mine:
            best, second = mx.sort(-logprobs.astype(mx.float32))[:2].tolist()
            assert second - best < HALF_TOLERANCE
            return


def test_forks_of_one_prompt_go_their_own_ways():
    model = tiny_llama()
    pool = make_pool(block_size=16)
    caches = build_paged_caches(model, pool, 1)
    with kvpool.attention():
        mx.eval(model(mx.array([PROMPT]), cache=caches))
        held = in_use(pool)
        forks = [copy.deepcopy(caches) for _ in range(3)]
        assert in_use(pool) == held
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


@needs_method_kernels
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
