"""PagedBatchGenerator: requests that do not fit wait, those that never could are refused."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext

import kvpool
import pytest
from kvpool import BlockPoolAllocator, PoolConfig
from kvpool._mlx_module import extension
from kvpool.core.exceptions import BlockPoolExhaustedError, RequestTooLargeError
from kvpool.mlx_lm import pool_model
from kvpool.mlx_lm.admission import PagedBatchGenerator
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import LRUPromptCache
from tiny_models import VOCABULARY, tiny_gemma3, tiny_llama

MODELS = {"llama": tiny_llama, "gemma3": tiny_gemma3}
BLOCK_SIZE = 4


def make_pool(n_blocks: int, **options) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=BLOCK_SIZE, n_blocks=n_blocks, **options))


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCABULARY), k=length)


def run(generator, uids) -> dict[int, list[int]]:
    """The tokens of all requests, by number."""
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    open_uids = set(uids)
    while open_uids:
        for response in generator.next()[1]:
            tokens[response.uid].append(response.token)
            if response.finish_reason is not None:
                open_uids.remove(response.uid)
    return tokens


def is_returned(pool) -> bool:
    """Whether all blocks come back; the step after the last token may still be reading some."""
    for _ in range(400):
        if pool.stats.blocks_in_use() == 0:
            break
        time.sleep(0.02)
    pool.check_invariants()
    return pool.stats.blocks_in_use() == 0


def room_for(model, n_tokens: int) -> int:
    """Blocks that one request of so many tokens is promised."""
    with pool_model(model, make_pool(64), paged=True) as pooled:
        return pooled.admission.blocks(n_tokens, chunk=2048, n_forks=3)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_requests_that_do_not_fit_together_wait_and_get_the_same_tokens(name, hooked):
    model = MODELS[name]()
    prompts = [prompt_of(length, seed) for seed, length in enumerate((30, 9, 41, 3, 25, 17))]
    lengths = [20, 33, 9, 40, 12, 25]
    stock = BatchGenerator(model)
    expected = list(run(stock, stock.insert(prompts, max_tokens=lengths)).values())
    pool = make_pool(room_for(model, 70))
    with pool_model(model, pool, paged=True) as pooled:
        generator = PagedBatchGenerator(model)
        uids = generator.insert(prompts, max_tokens=lengths)
        before = kvpool.attention_stats()
        with kvpool.attention() if hooked else nullcontext():
            answers = run(generator, uids)
        # Also where prompts of unequal length are read together. A GPU gathers pages of fp32.
        fell_back = kvpool.attention_stats().since(before).fell_back
        assert not fell_back or extension.default_backend() == "cuda"
        stats = pooled.admission.stats
    assert [answers[uid] for uid in uids] == expected
    assert (stats.admitted, stats.refused, stats.waiting) == (6, 0, 0)
    assert 2 <= stats.waited <= 5
    assert pool.stats.n_exhausted == 0 and is_returned(pool)


def test_mlx_lms_own_generator_runs_out_where_this_one_waits():
    model = tiny_llama()
    prompts = [prompt_of(20, seed) for seed in range(4)]
    with pool_model(model, make_pool(room_for(model, 50)), paged=True):
        generator = BatchGenerator(model)
        uids = generator.insert(prompts, max_tokens=[30] * 4)
        with pytest.raises(BlockPoolExhaustedError):
            run(generator, uids)


def test_requests_begin_in_the_order_in_which_they_came():
    model = tiny_llama()
    # The second needs all there is; the third would fit beside the first.
    prompts = [prompt_of(10, 1), prompt_of(40, 2), prompt_of(3, 3)]
    pool = make_pool(room_for(model, 60))
    with pool_model(model, pool, paged=True):
        generator = PagedBatchGenerator(model)
        uids = generator.insert(prompts, max_tokens=[12, 20, 4])
        began, open_uids = [], set(uids)
        while open_uids:
            for response in generator.next()[1]:
                if response.uid not in began:
                    began.append(response.uid)
                if response.finish_reason is not None:
                    open_uids.remove(response.uid)
    assert began == uids


def test_what_never_fits_is_refused_and_nothing_is_taken():
    model = tiny_llama()
    pool = make_pool(room_for(model, 60))
    with pool_model(model, pool, paged=True) as pooled:
        generator = PagedBatchGenerator(model)
        (uid,) = generator.insert([prompt_of(20, 1)], max_tokens=[40])
        with pytest.raises(
            RequestTooLargeError, match="prompt of 21 tokens and max_tokens=44 need"
        ):
            generator.insert([prompt_of(3, 2), prompt_of(21, 2)], max_tokens=[4, 44])
        assert len(run(generator, [uid])[uid]) == 40
        assert pooled.admission.stats.refused == 1 and pooled.admission.stats.admitted == 1


def test_a_request_that_waits_may_be_taken_back():
    model = tiny_llama()
    pool = make_pool(room_for(model, 60))
    with pool_model(model, pool, paged=True) as pooled:
        generator = PagedBatchGenerator(model)
        uids = generator.insert([prompt_of(20, seed) for seed in range(3)], max_tokens=[40] * 3)
        generator.next()
        assert pooled.admission.stats.waiting == 2
        generator.remove([uids[1]])
        generator.next()
        assert pooled.admission.stats.waiting == 1
        answers = run(generator, [uids[0], uids[2]])
        assert {len(answer) for answer in answers.values()} == {40}
        assert pooled.admission.stats.waiting == 0


def test_a_request_that_ends_early_lets_others_begin():
    model = tiny_llama()
    pool = make_pool(room_for(model, 60))
    with pool_model(model, pool, paged=True):
        generator = PagedBatchGenerator(model)
        uids = generator.insert([prompt_of(20, seed) for seed in range(2)], max_tokens=[40] * 2)
        for _ in range(5):
            generator.next()
        generator.remove([uids[0]])
        assert len(run(generator, [uids[1]])[uids[1]]) == 40
    assert is_returned(pool)


def test_prompts_that_are_kept_give_way():
    model = tiny_llama()
    pool = make_pool(room_for(model, 70))
    kept = LRUPromptCache()
    with pool_model(model, pool, paged=True) as pooled:
        pooled.admission.kept = kept
        generator = PagedBatchGenerator(model)
        for seed in range(4):
            prompt = prompt_of(30, seed)
            generator.insert([prompt], max_tokens=[20])
            done = False
            while not done:
                for response in generator.next()[1]:
                    if response.finish_reason is not None:
                        kept.insert_cache("m", response.all_tokens, response.prompt_cache)
                        done = True
            del response
        assert 1 <= len(kept) < 4
        assert pooled.admission.stats.dropped_prompts == 4 - len(kept)
        assert pool.stats.n_exhausted == 0


def test_shares_of_prompts_that_were_dropped_are_given_up_where_nothing_else_helps():
    model = tiny_llama()
    pool = make_pool(room_for(model, 70))
    kept = LRUPromptCache()
    expected = {}
    with pool_model(model, pool, paged=True) as pooled:
        pooled.admission.kept = kept
        generator = PagedBatchGenerator(model)
        prompt = prompt_of(30, 1)
        (uid,) = generator.insert([prompt], max_tokens=[10])
        while uid not in expected:
            for response in generator.next()[1]:
                if response.finish_reason is not None:
                    kept.insert_cache("m", response.all_tokens, response.prompt_cache)
                    expected[uid] = True
        del response
        # The first wants the whole pool; the second holds what was kept.
        cache, rest = kept.fetch_nearest_cache("m", [*prompt, 5, 6])
        n_known = len(prompt) + 2 - len(rest)
        assert n_known >= 30
        uids = generator.insert([prompt_of(40, 7)], max_tokens=[30])
        uids += generator.insert(
            [rest], max_tokens=[10], caches=[cache], all_tokens=[[*prompt, 5, 6][:n_known]]
        )
        del cache
        answers = run(generator, uids)
        assert [len(answers[uid]) for uid in uids] == [30, 10]
    stock = BatchGenerator(model)
    plain = run(stock, stock.insert([prompt_of(40, 7), [*prompt, 5, 6]], max_tokens=[30, 10]))
    assert list(answers.values()) == list(plain.values())


def test_a_pool_that_may_grow_admits_what_its_bound_holds():
    model = tiny_llama()
    for most in (None, room_for(model, 120)):
        pool = make_pool(2, grow_on_exhaustion=True, max_blocks=most)
        with pool_model(model, pool, paged=True) as pooled:
            assert pooled.admission.capacity == most
            generator = PagedBatchGenerator(model)
            uids = generator.insert([prompt_of(20, seed) for seed in range(4)], max_tokens=[30] * 4)
            assert {len(answer) for answer in run(generator, uids).values()} == {30}


def test_over_other_models_it_is_mlx_lms():
    model = tiny_llama()
    generator = PagedBatchGenerator(model)
    assert generator.admission is None
    (uid,) = generator.insert([prompt_of(5, 1)], max_tokens=[7])
    assert len(run(generator, [uid])[uid]) == 7
    with pool_model(model, make_pool(512)):
        assert PagedBatchGenerator(model).admission is None


@pytest.mark.parametrize("seed", range(3))
def test_no_mixture_of_requests_runs_out(seed):
    model = tiny_llama()
    choose = random.Random(seed)
    pool = make_pool(room_for(model, 100))
    kept = LRUPromptCache(max_size=4)
    prefix = prompt_of(24, 99)
    with pool_model(model, pool, paged=True) as pooled, kvpool.attention():
        pooled.admission.kept = kept
        generator = PagedBatchGenerator(model, prefill_step_size=8, completion_batch_size=6)
        to_come = [
            (prefix if choose.random() < 0.5 else []) + prompt_of(choose.randint(2, 40), i)
            for i in range(25)
        ]
        wanted, got = {}, {}
        while to_come or len(got) < len(wanted):
            if to_come and choose.random() < 0.4:
                prompt = to_come.pop()
                most = choose.randint(1, 30)
                cache, rest = kept.fetch_nearest_cache("m", prompt)
                n_known = len(prompt) - len(rest)
                options = {"caches": [cache], "all_tokens": [prompt[:n_known]]} if cache else {}
                (uid,) = generator.insert([rest], max_tokens=[most], **options)
                wanted[uid] = most
                del cache, options
            for response in generator.next()[1]:
                got.setdefault(response.uid, 0)
                if response.finish_reason is not None:
                    kept.insert_cache("m", response.all_tokens, response.prompt_cache)
            pool.check_invariants()
        while any(True for _ in generator._generation_batch.uids):
            generator.next()
        assert pooled.admission.stats.admitted == 25
    assert pool.stats.n_exhausted == 0
