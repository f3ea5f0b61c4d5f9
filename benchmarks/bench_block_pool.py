"""The allocator through Python, against the published package's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from types import ModuleType

import peer
from harness import OURS, Task, in_subprocess, main

BLOCK = 16
MANY = 16_384
LAYERS = 28

Measure = Callable[[ModuleType], float]


def pair(memory: ModuleType) -> float:
    """Allocate one block and free it."""
    pool = memory.BlockPoolAllocator(memory.PoolConfig(block_size=BLOCK, n_blocks=1024))
    allocate, free = pool.allocate, pool.free
    n = 20_000
    start = perf_counter()
    for _ in range(n):
        free(allocate("k", BLOCK, 1))
    return (perf_counter() - start) / n


def _many(memory: ModuleType, n_blocks: int = MANY) -> tuple:
    pool = memory.BlockPoolAllocator(memory.PoolConfig(block_size=BLOCK, n_blocks=2 * n_blocks))
    pool.allocate("k", n_blocks * BLOCK, 1)
    pool.free_all(1)  # warm: the objects and the owner have been made once
    return pool, n_blocks * BLOCK


def allocate_many(memory: ModuleType, n_blocks: int = MANY) -> float:
    pool, n_tokens = _many(memory, n_blocks)
    start = perf_counter()
    blocks = pool.allocate("k", n_tokens, 1)
    elapsed = perf_counter() - start
    del blocks
    return elapsed


def free_all_many(memory: ModuleType) -> float:
    pool, n_tokens = _many(memory)
    blocks = pool.allocate("k", n_tokens, 1)
    start = perf_counter()
    pool.free_all(1)
    elapsed = perf_counter() - start
    del blocks
    return elapsed


def free_list(memory: ModuleType, *, reverse: bool) -> float:
    pool, n_tokens = _many(memory)
    blocks = pool.allocate("k", n_tokens, 1)
    if reverse:
        blocks.reverse()
    start = perf_counter()
    pool.free(blocks)
    return perf_counter() - start


def blocks_for(memory: ModuleType) -> float:
    pool, n_tokens = _many(memory)
    blocks = pool.allocate("k", n_tokens, 1)
    start = perf_counter()
    held = pool.blocks_for(1)
    elapsed = perf_counter() - start
    assert len(held) == len(blocks)
    return elapsed


def shrink(memory: ModuleType) -> float:
    pool, _ = _many(memory)
    start = perf_counter()
    pool.shrink("k", 0)
    return perf_counter() - start


def bookkeeping(memory: ModuleType) -> float:
    """One token in every layer: the tails move on, and every 16 tokens there are new ones."""
    pool = memory.BlockPoolAllocator(memory.PoolConfig(block_size=BLOCK, n_blocks=LAYERS * 256))
    n = 100 * BLOCK
    tails: list = []
    mark_used = pool.mark_used
    start = perf_counter()
    for token in range(n):
        used = token % BLOCK + 1
        if used == 1:
            tails.clear()
            for _ in range(LAYERS):
                tails += pool.allocate("k", 1, 1)
                tails += pool.allocate("v", 1, 1)
        else:
            for tail in tails:
                mark_used(tail, used)
    return (perf_counter() - start) / n


def bookkeeping_batched(memory: ModuleType) -> float:
    """The same by the calls that take all layers at once."""
    pool = memory.BlockPoolAllocator(memory.PoolConfig(block_size=BLOCK, n_blocks=LAYERS * 256))
    n = 100 * BLOCK
    tails: list = []
    start = perf_counter()
    for token in range(n):
        used = token % BLOCK + 1
        if used == 1:
            keys, values = pool.allocate_kv(1, 1, layers=LAYERS)
            tails = keys + values
        else:
            pool.mark_used(tails, used)
    return (perf_counter() - start) / n


def threaded_pairs(memory: ModuleType) -> float:
    """Pairs of allocate and free_all a second, eight threads together, each its own owner."""
    pool = memory.BlockPoolAllocator(memory.PoolConfig(block_size=BLOCK, n_blocks=1024))
    n, threads = 2_000, 8

    def work(owner: int) -> None:
        for _ in range(n):
            pool.allocate("k", BLOCK, owner)
            pool.free_all(owner)

    workers = [threading.Thread(target=work, args=(owner,)) for owner in range(threads)]
    start = perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return n * threads / (perf_counter() - start)


_MEMORY = """
import os, resource
from {package}.memory import BlockPoolAllocator, PoolConfig
def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
n = 1_000_000
before = resident()
pool = BlockPoolAllocator(PoolConfig(n_blocks=n))
for _ in range(500):
    pool.allocate("k", 1000 * 16, 1)
    pool.allocate("v", 1000 * 16, 1)
print((resident() - before) / n)
"""


def process_memory(package: str) -> float:
    """Bytes of process memory a block of a pool that is used up, no handle held."""
    return in_subprocess(_MEMORY.format(package=package), path=[peer.FOLDER])


def tasks() -> list[Task]:
    peer.install()
    import kvpool.memory
    import veloxquant_mlx.memory

    def both(measure: Measure, ours: Measure | None = None) -> dict[str, Callable[[], float]]:
        return {
            OURS: lambda: (ours or measure)(kvpool.memory),
            peer.NAME: lambda: measure(veloxquant_mlx.memory),
        }

    def linear() -> float:
        double, single = (
            min(allocate_many(kvpool.memory, n) for _ in range(5)) for n in (2 * MANY, MANY)
        )
        return double / single

    def backwards(memory: ModuleType) -> float:
        return free_list(memory, reverse=True)

    def in_order(memory: ModuleType) -> float:
        return free_list(memory, reverse=False)

    return [
        Task("allocate one block and free it", "ns", both(pair), reach=14),
        Task(f"allocate {MANY:,} blocks", "us", both(allocate_many), reach=20),
        Task(f"free_all of {MANY:,} blocks", "us", both(free_all_many), reach=75),
        Task(f"free(list) of {MANY:,}, in order", "us", both(in_order), reach=150),
        Task(f"free(list) of {MANY:,}, reversed", "us", both(backwards), reach=10_000),
        Task(f"blocks_for of {MANY:,} blocks", "us", both(blocks_for)),
        Task(f"shrink by {MANY:,} blocks", "us", both(shrink)),
        Task(f"{LAYERS} layers K and V, a token, single calls", "us", both(bookkeeping), reach=3),
        Task(
            f"{LAYERS} layers K and V, a token, batched",
            "us",
            both(bookkeeping, ours=bookkeeping_batched),
            reach=12,
        ),
        Task(
            "8 threads, allocate and free_all", "pairs/s", both(threaded_pairs), more_is_better=True
        ),
        Task(
            "process memory a block",
            "bytes",
            {
                OURS: lambda: process_memory("kvpool"),
                peer.NAME: lambda: process_memory(peer.IMPORT),
            },
            reach_value=48,
        ),
        Task(f"allocate {2 * MANY:,} to {MANY:,}", "ratio", {OURS: linear}, reach_value=2.5),
    ]


if __name__ == "__main__":
    main("block pool, through Python", tasks)
