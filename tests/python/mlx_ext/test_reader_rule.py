"""A reader that is not evaluated yet keeps what it reads, whatever happens to the cache."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import attention_oracle as oracle
import mlx.core as mx
import pytest
from kvpool import BlockPoolAllocator, BlockPoolExhaustedError
from page_backends import Backend, Pages
from paged_layers import make_group, shows

SCALE = 0.25
PAGES = Pages("fp16")


class Scene:
    """A layer with tokens, a lazy attention and a lazy gather over them, and what both must say."""

    def __init__(self, backend: Backend, n_blocks: int = 64, evaluated: bool = True) -> None:
        self.backend = backend
        self.pool = backend.pool(n_blocks)
        self.group = make_group(self.pool)
        self.layer, self.tokens = PAGES.layer(self.group), PAGES.tokens()
        self.read = self.layer.update_and_fetch(*self.tokens.next(42))
        if evaluated:
            mx.eval(self.layer.order)
        self.seen = self.tokens.copy(7)
        self.queries = PAGES.queries()
        self.attended: Any = backend.attend(PAGES, self.queries, self.read, SCALE)

    def check(self) -> None:
        """Evaluates both readers."""
        right = oracle.attention(self.queries, self.seen.keys, self.seen.values, SCALE)
        allowed = self.backend.tolerance(PAGES, self.attended.dtype)
        assert oracle.error(self.attended, right) < allowed
        assert shows(self.read, self.seen)
        self.drop_readers()
        self.backend.settle()
        self.group.check_invariants()
        self.pool.check_invariants()

    def drop_readers(self) -> None:
        self.attended = self.read = None


def overwrite(pool: BlockPoolAllocator) -> None:
    """Takes all blocks that are free and fills their pages."""
    layer, tokens = PAGES.layer(make_group(pool, 99)), PAGES.tokens(50)
    try:
        while True:
            mx.eval(layer.update_and_fetch(*tokens.next(16)))
    except BlockPoolExhaustedError:
        pass


def release(scene: Scene) -> None:
    scene.group.release()


def reset(scene: Scene) -> None:
    scene.layer.reset()


def trim(scene: Scene) -> None:
    scene.layer.trim(30)
    scene.tokens.trim(30)
    mx.eval(scene.layer.update_and_fetch(*scene.tokens.next(30)))


def free_all(scene: Scene) -> None:
    scene.pool.free_all(scene.group.owner)


def collect(scene: Scene) -> None:
    scene.layer = None
    gc.collect()


def append(scene: Scene) -> None:
    mx.eval(scene.layer.update_and_fetch(*scene.tokens.next(60)))


def adopt(scene: Scene) -> None:
    scene.layer.adopt(*PAGES.tokens(8).next(40), 40)
    mx.eval(scene.layer.order)


def fork_and_diverge(scene: Scene) -> None:
    twin = scene.layer.fork(make_group(scene.pool, 2))
    twin.trim(8)
    mx.eval(twin.update_and_fetch(*PAGES.tokens(9).next(22)))
    scene.layer.trim(4)
    mx.eval(scene.layer.update_and_fetch(*PAGES.tokens(10).next(10)))


def exhaust(scene: Scene) -> None:
    with pytest.raises(BlockPoolExhaustedError):
        scene.layer.update_and_fetch(*PAGES.tokens(11).next(16 * 64))


EVENTS = [release, reset, trim, free_all, collect, append, adopt, fork_and_diverge, exhaust]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("evaluated", [True, False])
def test_a_lazy_reader_is_not_disturbed(
    backend: Backend, event: Callable[[Scene], None], evaluated: bool
) -> None:
    scene = Scene(backend, evaluated=evaluated)
    event(scene)
    overwrite(scene.pool)
    scene.check()


@pytest.mark.parametrize("event", EVENTS)
def test_a_reader_under_way_is_not_disturbed(
    backend: Backend, event: Callable[[Scene], None]
) -> None:
    scene = Scene(backend)
    mx.async_eval(scene.attended, *scene.read)
    event(scene)
    overwrite(scene.pool)
    scene.check()


def test_a_reader_s_blocks_count_as_in_use_until_it_goes(backend: Backend) -> None:
    scene = Scene(backend)
    assert scene.pool.stats.blocks_in_use() == 6
    scene.group.release()
    assert scene.pool.stats.blocks_in_use() == 6
    scene.check()
    assert scene.pool.stats.blocks_in_use() == 0


def test_field_D3_and_D10_blocks_freed_under_a_reader_are_not_handed_out(backend: Backend) -> None:
    scene = Scene(backend, n_blocks=8)
    scene.pool.free_all(scene.group.owner)
    assert scene.pool.n_free("k") + scene.pool.n_free("v") == 2
    overwrite(scene.pool)
    scene.check()
    assert scene.pool.stats.blocks_in_use() == 0


def test_an_exception_between_update_and_evaluation_changes_nothing(backend: Backend) -> None:
    scene = Scene(backend)
    scene.drop_readers()

    def step() -> None:
        scene.layer.update_and_fetch(*scene.tokens.copy(5).next(6))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step()
    assert scene.layer.trim(6) == 6
    assert shows(scene.layer.update_and_fetch(*scene.tokens.next(6)), scene.tokens)


def test_readers_of_every_step_show_their_step(backend: Backend) -> None:
    layer, tokens = PAGES.layer(make_group(backend.pool())), PAGES.tokens()
    readers = []
    for n in (12, 1, 1, 1, 18, 1):
        readers.append((layer.update_and_fetch(*tokens.next(n)), tokens.copy(0)))
    assert layer.trim(10) == 10
    tokens.trim(10)
    readers.append((layer.update_and_fetch(*tokens.next(2)), tokens.copy(0)))
    for read, then in reversed(readers):
        assert shows(read, then)


def test_forks_of_tokens_that_are_not_written_yet_show_them(backend: Backend) -> None:
    pool = backend.pool()
    layer, tokens = PAGES.layer(make_group(pool)), PAGES.tokens()
    layer.update_and_fetch(*tokens.next(26))
    twin, twin_tokens = layer.fork(make_group(pool, 2)), tokens.copy(1)
    read = layer.update_and_fetch(*tokens.next(4))
    twin_read = twin.update_and_fetch(*twin_tokens.next(8))
    del layer
    assert shows(twin_read, twin_tokens)
    assert shows(read, tokens)
    assert shows(twin.update_and_fetch(*twin_tokens.next(1)), twin_tokens)


def test_a_fork_takes_no_block_and_copies_a_tail_when_it_is_written_to(backend: Backend) -> None:
    pool = backend.pool()
    layer, tokens = PAGES.layer(make_group(pool)), PAGES.tokens()
    mx.eval(layer.update_and_fetch(*tokens.next(26)))
    assert pool.stats.blocks_in_use() == 4
    twin, twin_tokens = layer.fork(make_group(pool, 2)), tokens.copy(1)
    assert pool.stats.blocks_in_use() == 4
    assert shows(twin.keys_and_values(), tokens)
    twin.update_and_fetch(*twin_tokens.next(1))
    assert pool.stats.blocks_in_use() == 6
    assert shows(twin.keys_and_values(), twin_tokens)
    assert shows(layer.update_and_fetch(*tokens.next(1)), tokens)
    assert shows(twin.keys_and_values(), twin_tokens)
    assert pool.stats.blocks_in_use() == 6
