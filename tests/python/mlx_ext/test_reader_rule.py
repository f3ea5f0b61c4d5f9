"""A reader that is not evaluated yet keeps what it reads, whatever happens to the cache."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kvpool import BlockPoolAllocator, BlockPoolExhaustedError
from kvpool._mlx_module import extension
from paged_layers import Tokens, make_group, make_layer, make_pool, shows

SCALE = 0.25


class Scene:
    """A layer with tokens, a lazy attention and a lazy gather over them, and what both must say."""

    def __init__(self, n_blocks: int = 64, n_tokens: int = 21, evaluated: bool = True) -> None:
        self.pool = make_pool(n_blocks)
        self.group = make_group(self.pool)
        self.layer, self.tokens = make_layer(self.group), Tokens()
        self.read = self.layer.update_and_fetch(*self.tokens.next(n_tokens))
        if evaluated:
            mx.eval(self.layer.order)
        self.seen = self.tokens.copy(7)
        random = np.random.default_rng(3)
        self.queries = mx.array(random.standard_normal((1, 4, 1, 16), dtype=np.float32))
        self.attended: Any = extension.attend(self.queries, *self.read, SCALE)
        assert isinstance(self.attended, mx.array)

    def check(self) -> None:
        """Evaluates both readers."""
        dense = mx.fast.scaled_dot_product_attention(
            self.queries, self.seen.keys, self.seen.values, scale=SCALE
        )
        assert np.allclose(self.attended, dense, atol=1e-6)
        assert shows(self.read, self.seen)
        self.drop_readers()
        self.group.check_invariants()
        self.pool.check_invariants()

    def drop_readers(self) -> None:
        self.attended = self.read = None


def overwrite(pool: BlockPoolAllocator) -> None:
    """Takes all blocks that are free and fills their pages."""
    layer, tokens = make_layer(make_group(pool, 99)), Tokens(50)
    try:
        while True:
            mx.eval(layer.update_and_fetch(*tokens.next(8)))
    except BlockPoolExhaustedError:
        pass


def release(scene: Scene) -> None:
    scene.group.release()


def reset(scene: Scene) -> None:
    scene.layer.reset()


def trim(scene: Scene) -> None:
    scene.layer.trim(15)
    scene.tokens.trim(15)
    mx.eval(scene.layer.update_and_fetch(*scene.tokens.next(15)))


def free_all(scene: Scene) -> None:
    scene.pool.free_all(scene.group.owner)


def collect(scene: Scene) -> None:
    scene.layer = None
    gc.collect()


def append(scene: Scene) -> None:
    mx.eval(scene.layer.update_and_fetch(*scene.tokens.next(30)))


def adopt(scene: Scene) -> None:
    scene.layer.adopt(*Tokens(8).next(20), 20)
    mx.eval(scene.layer.order)


def fork_and_diverge(scene: Scene) -> None:
    twin = scene.layer.fork(make_group(scene.pool, 2))
    twin.trim(4)
    mx.eval(twin.update_and_fetch(*Tokens(9).next(11)))
    scene.layer.trim(2)
    mx.eval(scene.layer.update_and_fetch(*Tokens(10).next(5)))


def exhaust(scene: Scene) -> None:
    with pytest.raises(BlockPoolExhaustedError):
        scene.layer.update_and_fetch(*Tokens(11).next(8 * 64))


EVENTS = [release, reset, trim, free_all, collect, append, adopt, fork_and_diverge, exhaust]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("evaluated", [True, False])
def test_a_lazy_reader_is_not_disturbed(event: Callable[[Scene], None], evaluated: bool) -> None:
    scene = Scene(evaluated=evaluated)
    event(scene)
    overwrite(scene.pool)
    scene.check()


@pytest.mark.parametrize("event", EVENTS)
def test_a_reader_under_way_is_not_disturbed(event: Callable[[Scene], None]) -> None:
    scene = Scene()
    mx.async_eval(scene.attended, *scene.read)
    event(scene)
    overwrite(scene.pool)
    scene.check()


def test_a_reader_s_blocks_count_as_in_use_until_it_goes() -> None:
    scene = Scene()
    assert scene.pool.stats.blocks_in_use() == 6
    scene.group.release()
    assert scene.pool.stats.blocks_in_use() == 6
    scene.check()
    assert scene.pool.stats.blocks_in_use() == 0


def test_field_D3_and_D10_blocks_freed_under_a_reader_are_not_handed_out() -> None:
    scene = Scene(n_blocks=8)
    scene.pool.free_all(scene.group.owner)
    assert scene.pool.n_free("k") + scene.pool.n_free("v") == 2
    overwrite(scene.pool)
    scene.check()
    assert scene.pool.stats.blocks_in_use() == 0


def test_an_exception_between_update_and_evaluation_changes_nothing() -> None:
    scene = Scene()
    scene.drop_readers()

    def step() -> None:
        scene.layer.update_and_fetch(*scene.tokens.copy(5).next(3))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step()
    assert scene.layer.trim(3) == 3
    assert shows(scene.layer.update_and_fetch(*scene.tokens.next(3)), scene.tokens)


def test_readers_of_every_step_show_their_step() -> None:
    layer, tokens = make_layer(), Tokens()
    readers = []
    for n in (6, 1, 1, 1, 9, 1):
        readers.append((layer.update_and_fetch(*tokens.next(n)), tokens.copy(0)))
    assert layer.trim(5) == 5
    tokens.trim(5)
    readers.append((layer.update_and_fetch(*tokens.next(2)), tokens.copy(0)))
    for read, then in reversed(readers):
        assert shows(read, then)


def test_forks_of_tokens_that_are_not_written_yet_show_them() -> None:
    pool = make_pool()
    layer, tokens = make_layer(make_group(pool)), Tokens()
    layer.update_and_fetch(*tokens.next(13))
    twin, twin_tokens = layer.fork(make_group(pool, 2)), tokens.copy(1)
    read = layer.update_and_fetch(*tokens.next(2))
    twin_read = twin.update_and_fetch(*twin_tokens.next(4))
    del layer
    assert shows(twin_read, twin_tokens)
    assert shows(read, tokens)
    assert shows(twin.update_and_fetch(*twin_tokens.next(1)), twin_tokens)


def test_a_fork_takes_no_block_and_copies_a_tail_when_it_is_written_to() -> None:
    pool = make_pool()
    layer, tokens = make_layer(make_group(pool)), Tokens()
    mx.eval(layer.update_and_fetch(*tokens.next(13)))
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
