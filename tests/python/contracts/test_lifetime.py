"""Caches that are dropped give their blocks back, wherever and whenever."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import mlx.core as mx
import pytest
from cache_kinds import DECODING, REQUESTS, append, decode, in_use, make_pool, prompt, rows
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from tiny_models import tiny_llama

over_kinds = pytest.mark.parametrize("kind", REQUESTS, ids=str)


def filled(kind, pool, n: int = 10):
    (cache,) = kind.layers(pool, n_layers=1)
    mx.eval(append(cache, n))
    return cache


@over_kinds
def test_a_dropped_cache_gives_its_blocks_back(kind):
    pool = make_pool(block_size=4)
    cache = filled(kind, pool)
    assert in_use(pool) == 6
    del cache
    assert in_use(pool) == 0


@over_kinds
def test_a_cache_in_a_cycle_gives_its_blocks_back_when_collected(kind):
    pool = make_pool()
    cache = filled(kind, pool)
    cache.myself = cache
    del cache
    gc.collect()
    assert in_use(pool) == 0


@over_kinds
def test_a_cache_outlives_the_callers_pool(kind):
    cache = filled(kind, make_pool(block_size=4))
    gc.collect()
    assert in_use(cache.pool) == 6


@over_kinds
def test_a_cache_may_be_dropped_in_another_thread(kind):
    pool = make_pool()
    held = [filled(kind, pool)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert in_use(pool) == 0


@over_kinds
def test_caches_are_collected_in_other_threads(kind):
    pool = make_pool(n_blocks=1024, block_size=4)
    shared, errors = [], []

    def work(seed: int) -> None:
        try:
            stream = mx.new_stream(mx.default_device())
            for i in range(20):
                with mx.stream(stream):
                    cache = filled(kind, pool, 1 + (7 * i + seed) % 20)
                    cache.myself = cache  # left to whichever thread collects next
                    shared.append(filled(kind, pool, 3))
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
    assert in_use(pool) == 0
    pool.check_invariants()


def test_caches_may_be_alive_when_the_interpreter_exits():
    code = """
import threading, mlx.core as mx
from kvpool.memory import BlockPoolAllocator, PoolBackedKVCache, PoolConfig
from kvpool import PagedKVCache
pool = BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=64))
def filled():
    caches = [PoolBackedKVCache(pool, 1, 4), PagedKVCache(pool, 1)]
    for cache in caches:
        cache.update_and_fetch(mx.zeros((1, 1, 9, 4)), mx.zeros((1, 1, 9, 4)))
    return caches
kept = filled()
for cache in kept:
    cache.myself = cache
local = threading.local()
local.caches = filled()
import sys; sys.kept = filled()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@over_kinds
def test_caches_work_in_a_thread_that_ends_before_they_do(kind):
    pool = make_pool()
    caches = []

    def work() -> None:
        caches.append(filled(kind, pool, 10))
        mx.eval([caches[0].state])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    cache = caches.pop()
    keys, _ = append(cache, 1)
    assert mx.array_equal(keys, rows(11))
    del cache, keys, _
    assert in_use(pool) == 0


# --- prompt caches --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DECODING, ids=str)
def test_the_lru_prompt_cache_of_the_server_holds_them(kind):
    model, pool = tiny_llama(), make_pool(n_blocks=16384, block_size=4)
    lru = LRUPromptCache(max_size=2)
    key = ("tiny", None, None)

    def answer(tokens: list[int], ours: bool) -> list[int]:
        if not ours:
            return decode(model, make_prompt_cache(model), tokens, 12)
        caches, rest = lru.fetch_nearest_cache(key, tokens)
        if caches is None:
            caches = kind.build(model, pool, pool.new_owner())
        with kind.attention():
            new = decode(model, caches, rest, 12)
        lru.insert_cache(key, tokens + new, caches)
        return new

    first = prompt(12)
    longer = first + answer(first, True) + [3, 4]
    forked = [*first[:8], 1, 2, 3]
    for tokens in (longer, forked, longer, [7, 8, 9]):
        assert answer(tokens, True) == answer(tokens, False)
        pool.check_invariants()
    gc.collect()
    # Two entries of three layers are left; those that the LRU dropped have given their blocks back.
    kept = [
        lru._trie.get(*entry).prompt_cache for each in lru._lru._lrus.values() for entry in each
    ]
    assert len(kept) == 2
    held = sum(cache.n_blocks_held() for caches in kept for cache in caches)
    assert in_use(pool) == held > 0
    del kept
    lru.trim_to(n_sequences=0)
    gc.collect()
    assert in_use(pool) == 0
