"""One pool under threads, signal handlers and fork."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from kvpool.memory import BlockPoolAllocator, BlockPoolExhaustedError, PoolConfig


@pytest.fixture
def busy_switching() -> Iterator[None]:
    """Lets threads change as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def run_threads(works: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "hangs"
    assert not errors, errors


@pytest.mark.usefixtures("busy_switching")
def test_field_I7_no_block_is_handed_out_twice() -> None:
    pool = BlockPoolAllocator(PoolConfig(block_size=1, n_blocks=64, separate_kv=False))
    live: set[int] = set()

    def work(owner: int) -> None:
        choice = random.Random(owner)
        for _ in range(5_000):
            try:
                blocks = pool.allocate("k", choice.randint(1, 4), owner)
            except BlockPoolExhaustedError:
                continue
            ids = {block.block_id for block in blocks}
            assert not ids & live
            live.update(ids)
            live.difference_update(ids)
            pool.free(blocks) if choice.random() < 0.5 else pool.free_all(owner)

    run_threads([lambda owner=owner: work(owner) for owner in range(8)])
    assert pool.n_free() == 64
    pool.check_invariants()


@pytest.mark.usefixtures("busy_switching")
def test_fault_F14_history_and_snapshots_are_consistent_under_load() -> None:
    pool = BlockPoolAllocator(PoolConfig(block_size=1, n_blocks=64, separate_kv=False))
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            pool.allocate("k", 8, 1)
            pool.free_all(1)

    def read() -> None:
        try:
            for _ in range(300):
                for stats in [*pool.history, pool.stats.snapshot()]:
                    assert stats.blocks_in_use() in (0, 8)
                    assert stats.n_allocations % 8 == 0
        finally:
            stop.set()

    run_threads([allocate, read])


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers")
def test_fault_F12_signal_handler_that_calls_the_pool() -> None:
    pool = BlockPoolAllocator(PoolConfig(block_size=1, n_blocks=256))
    calls = 0

    def handler(*_: object) -> None:
        nonlocal calls
        calls += 1
        pool.free(pool.allocate("v", 3, owner=2))
        assert pool.stats.snapshot().n_blocks == 256
        signal.setitimer(signal.ITIMER_REAL, 1e-4)

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-4)
    try:
        deadline = time.monotonic() + 30
        while calls < 100 and time.monotonic() < deadline:
            blocks = pool.allocate("k", 100, 1)
            pool.mark_used(blocks, 0)
            pool.free(block for block in blocks)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls >= 100
    pool.check_invariants()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_children_have_a_pool_that_works() -> None:
    """Other threads keep the pool busy while this one forks."""
    pool = BlockPoolAllocator(PoolConfig(block_size=1, n_blocks=256))
    stop = threading.Event()

    def work(owner: int) -> None:
        while not stop.is_set():
            pool.allocate("k", 4, owner)
            pool.free_all(owner)

    def fork() -> None:
        try:
            for _ in range(20):
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        signal.alarm(30)  # a lock that nobody holds ends the child
                        pool.free(pool.allocate("v", 10, 9))
                        pool.check_invariants()
                        code = 0
                    finally:
                        os._exit(code)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            stop.set()

    run_threads([lambda: work(1), lambda: work(2), fork])
    pool.check_invariants()
