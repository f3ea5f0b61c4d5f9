"""Caches that are dropped give their blocks back, wherever and whenever."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading

import mlx.core as mx
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.memory.pool_backed_cache import PoolBackedKVCache, build_pooled_caches
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from tiny_models import VOCABULARY, tiny_llama

PROMPT = [(11 * i + 5) % VOCABULARY for i in range(12)]


def make_pool(n_blocks: int = 1024) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=n_blocks))


def filled(pool, n: int = 10, owner: int = -1) -> PoolBackedKVCache:
    cache = PoolBackedKVCache(pool, owner, step=4)
    data = mx.zeros((1, 1, n, 4))
    cache.update_and_fetch(data, data)
    return cache


def test_a_dropped_cache_gives_its_blocks_back():
    pool = make_pool()
    cache = filled(pool)
    assert pool.stats.blocks_in_use() == 6
    del cache
    assert pool.stats.blocks_in_use() == 0


def test_a_cache_in_a_cycle_gives_its_blocks_back_when_collected():
    pool = make_pool()
    cache = filled(pool)
    cache.myself = cache
    del cache
    gc.collect()
    assert pool.stats.blocks_in_use() == 0


def test_a_cache_outlives_the_callers_pool():
    cache = filled(make_pool())
    gc.collect()
    assert cache.pool.stats.blocks_in_use() == 6


def test_caches_are_collected_in_other_threads():
    pool = make_pool()
    shared, errors = [], []

    def work(seed: int) -> None:
        try:
            stream = mx.new_stream(mx.cpu)
            for i in range(30):
                with mx.stream(stream):
                    cache = filled(pool, 1 + (7 * i + seed) % 20)
                    cache.myself = cache  # left to whichever thread collects next
                    shared.append(filled(pool, 3))
                if len(shared) > 8:
                    shared.pop(0)
                if i % 5 == seed % 5:
                    gc.collect()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    shared.clear()
    gc.collect()
    assert pool.stats.blocks_in_use() == 0
    pool.check_invariants()


def test_a_cache_may_be_alive_when_the_interpreter_exits():
    code = """
import threading, mlx.core as mx
from kvpool.memory import BlockPoolAllocator, PoolBackedKVCache, PoolConfig
pool = BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=64))
def filled():
    cache = PoolBackedKVCache(pool, 1)
    cache.update_and_fetch(mx.zeros((1, 1, 9, 4)), mx.zeros((1, 1, 9, 4)))
    return cache
kept = filled()
kept.myself = kept
local = threading.local()
local.cache = filled()
import sys; sys.kept = filled()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_caches_work_in_a_thread_that_ends_before_they_do():
    pool = make_pool()
    caches = []

    def work() -> None:
        caches.append(filled(pool, 10))
        mx.eval(caches[0].state)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    cache = caches.pop()
    data = mx.ones((1, 1, 1, 4))
    keys, _ = cache.update_and_fetch(data, data)
    assert mx.sum(keys).item() == 4
    del cache, keys
    assert pool.stats.blocks_in_use() == 0


# --- prompt caches --------------------------------------------------------------------------------


def decode(model, caches, prompt, n=12):
    steps = generate_step(mx.array(prompt), model, max_tokens=n, prompt_cache=caches)
    return [int(token) for token, _ in steps]


def test_fault_F39_a_copied_list_is_one_new_group_with_one_new_owner():
    model, pool = tiny_llama(), make_pool(n_blocks=4096)
    caches = build_pooled_caches(model, pool, owner=1)
    decode(model, caches, PROMPT, n=1)
    before = pool.stats.blocks_in_use()
    twins = copy.deepcopy(caches)
    assert pool.stats.blocks_in_use() == 2 * before
    assert {twin.owner for twin in twins} != {1} and len({twin.owner for twin in twins}) == 1
    twins[2].release()
    assert pool.stats.blocks_in_use() == before
    assert [twin.empty() for twin in twins] == [True, True, True]
    assert len(pool.blocks_for(1)) == before


def test_a_copy_that_does_not_fit_charges_nothing():
    model, pool = tiny_llama(), make_pool(n_blocks=3 * 2 * 64 + 200)
    caches = build_pooled_caches(model, pool, owner=1)
    decode(model, caches, PROMPT, n=1)
    before = pool.stats.blocks_in_use()
    try:
        copy.deepcopy(caches)
    except BlockPoolExhaustedError:
        pass
    else:
        raise AssertionError("256 rows in three layers do not fit twice")
    gc.collect()
    assert pool.stats.blocks_in_use() == before


def test_the_lru_prompt_cache_of_the_server_holds_pooled_caches():
    model, pool = tiny_llama(), make_pool(n_blocks=16384)
    lru = LRUPromptCache(max_size=2)
    key = ("tiny", None, None)

    def answer(prompt: list[int], pooled: bool) -> list[int]:
        if not pooled:
            return decode(model, make_prompt_cache(model), prompt)
        caches, rest = lru.fetch_nearest_cache(key, prompt)
        if caches is None:
            caches = build_pooled_caches(model, pool, pool.new_owner())
        tokens = decode(model, caches, rest)
        lru.insert_cache(key, prompt + tokens, caches)
        return tokens

    first = PROMPT
    longer = PROMPT + answer(first, True) + [3, 4]
    forked = [*PROMPT[:8], 1, 2, 3]
    for prompt in (longer, forked, longer, [7, 8, 9]):
        assert answer(prompt, True) == answer(prompt, False)
        pool.check_invariants()
    gc.collect()
    # Two entries of three layers are left; those that the LRU dropped have given their blocks back.
    assert pool.stats.blocks_in_use() == 2 * 3 * 2 * 64
    lru.trim_to(n_sequences=0)
    gc.collect()
    assert pool.stats.blocks_in_use() == 0
