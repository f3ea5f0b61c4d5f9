"""Streams belong to threads: appends stay in order, and a cache outlives a thread."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from kvpool._mlx_module import extension
from paged_layers import Tokens, make_group, make_layer, make_pool, shows


def in_thread(body: Callable[[], Any]) -> Any:
    """Runs `body` in a thread that has ended when this returns."""
    result: list[Any] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            result.append(body())
        except BaseException as caught:
            error.append(caught)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if error:
        raise error[0]
    return result[0]


def test_async_steps_show_their_tokens() -> None:
    layer, tokens = make_layer(), Tokens()
    fetched = layer.update_and_fetch(*tokens.next(5))
    mx.async_eval(*fetched)
    for _ in range(40):
        following = layer.update_and_fetch(*tokens.next(1))
        mx.async_eval(*following)
        mx.eval(fetched)
        fetched = following
    assert shows(fetched, tokens)


def test_appends_on_two_streams_run_in_order() -> None:
    streams = [mx.new_stream(mx.cpu) for _ in range(2)]
    layer, tokens = make_layer(), Tokens()
    for i in range(30):
        with mx.stream(streams[i % 2]):
            keys, values = tokens.next(1 + i % 3)
            fetched = layer.update_and_fetch(keys + 0, values + 0)
            mx.async_eval(*fetched)
        if i % 7 == 0:
            assert shows(fetched, tokens)
    assert shows(fetched, tokens)


def test_a_cache_goes_on_in_another_thread() -> None:
    layer, tokens = make_layer(), Tokens()

    def append() -> None:
        mx.eval(layer.update_and_fetch(*tokens.next(9)))

    in_thread(append)
    in_thread(append)
    assert shows(layer.update_and_fetch(*tokens.next(3)), tokens)


def test_tokens_of_a_thread_that_ended_before_it_evaluated_them_are_taken_back() -> None:
    pool = make_pool()
    layer, tokens = make_layer(make_group(pool)), Tokens()
    mx.eval(layer.update_and_fetch(*tokens.next(13)))

    def leave_behind() -> tuple[mx.array, mx.array]:
        lost = Tokens(5)
        layer.update_and_fetch(*lost.next(1))
        return layer.update_and_fetch(*lost.next(6))  # a reader that can never be evaluated

    reader = in_thread(leave_behind)
    assert layer.offset == 13
    assert shows(layer.keys_and_values(), tokens)
    assert shows(layer.update_and_fetch(*tokens.next(2)), tokens)
    with pytest.raises(RuntimeError):
        mx.eval(reader)
    del reader
    assert shows(layer.update_and_fetch(*tokens.next(9)), tokens)
    layer.group.check_invariants()
    layer.reset()
    mx.synchronize()  # a GPU gives blocks back once it has run
    assert pool.stats.blocks_in_use() == 0


def test_a_request_whose_window_cannot_go_back_is_emptied_and_says_so() -> None:
    pool = make_pool()
    group = make_group(pool)
    layers = [make_layer(group, window=window) for window in (0, 10)]
    tokens = Tokens()
    mx.eval([layer.update_and_fetch(*tokens.next(33)) for layer in layers])

    def leave_behind() -> None:
        lost = Tokens(5)
        for _ in range(20):
            for layer in layers:
                layer.update_and_fetch(*lost.next(1))

    in_thread(leave_behind)
    with pytest.raises(RuntimeError, match=r"20 tokens were appended in a thread that ended"):
        layers[1].keys_and_values()
    for layer in layers:
        assert layer.offset == 0
        assert layer.keys_and_values() is None
    anew = [Tokens(7) for _ in layers]
    for layer, its in zip(layers, anew, strict=True):
        assert shows(layer.update_and_fetch(*its.next(4)), its)
    group.check_invariants()


def test_adopted_tokens_that_were_never_evaluated_leave_an_empty_layer() -> None:
    layer = make_layer(window=8)
    in_thread(lambda: layer.adopt(*(rows + 0 for rows in Tokens(5).next(10)), 30))
    assert layer.offset == 0
    tokens = Tokens()
    assert shows(layer.update_and_fetch(*tokens.next(4)), tokens)
    layer.group.check_invariants()


def test_a_fork_made_after_a_thread_ended_is_a_fork_of_what_is_left() -> None:
    pool = make_pool()
    layer, tokens = make_layer(make_group(pool)), Tokens()
    mx.eval(layer.update_and_fetch(*tokens.next(5)))
    in_thread(lambda: layer.update_and_fetch(*Tokens(5).next(6)) and None)
    twin = layer.fork(make_group(pool, 2))
    assert twin.offset == layer.offset == 5
    assert shows(twin.keys_and_values(), tokens)


@pytest.mark.parametrize("tiers", [[], [("int8", 0)]])
def test_a_fork_loses_the_tokens_that_its_origin_could_not_keep(tiers: list[Any]) -> None:
    """Both wait for one append; whoever comes first takes it back, the other one as well."""
    pool = make_pool()
    layer = make_layer(make_group(pool), format="fp16", tiers=tiers)
    tokens = Tokens(dtype=mx.float16)
    mx.eval(layer.update_and_fetch(*tokens.next(14)))

    def leave_behind() -> list[Any]:
        layer.update_and_fetch(*Tokens(5, dtype=mx.float16).next(8))
        return [layer, layer.fork(make_group(pool, 2)), layer.fork(make_group(pool, 3))]

    for fork in in_thread(leave_behind):
        assert fork.offset == 14
        assert mx.allclose(fork.keys_and_values()[0], tokens.keys, atol=0.05)
        more = Tokens(6, dtype=mx.float16).next(11)
        keys, _ = fork.update_and_fetch(*more)
        assert mx.allclose(keys, mx.concatenate([tokens.keys, more[0]], axis=2), atol=0.05)
        fork.group.check_invariants()
    assert mx.allclose(layer.keys_and_values()[0][:, :, :14], tokens.keys, atol=0.05)


def test_tokens_whose_blocks_moved_meanwhile_stay_readable() -> None:
    """What a lost append was to move (a shared tail, older blocks) is moved without it."""
    pool = make_pool()
    layer = make_layer(make_group(pool), format="fp16", tiers=[("int8", 0)])
    tokens = Tokens(dtype=mx.float16)
    mx.eval(layer.update_and_fetch(*tokens.next(14)))
    twin = layer.fork(make_group(pool, 2))
    in_thread(lambda: layer.update_and_fetch(*Tokens(5, dtype=mx.float16).next(8)) and None)
    assert layer.offset == 14
    keys, _ = layer.keys_and_values()
    assert mx.allclose(keys, tokens.keys, atol=0.05)
    keys, _ = layer.update_and_fetch(*tokens.next(4))
    assert mx.allclose(keys, tokens.keys, atol=0.05)
    keys, _ = twin.keys_and_values()
    assert mx.allclose(keys, tokens.keys[:, :, :14], atol=0.05)


def test_a_thread_may_use_another_thread_s_arrays_once_evaluated() -> None:
    layer, tokens = make_layer(), Tokens()
    fetched = layer.update_and_fetch(*tokens.next(9))
    mx.eval(fetched)
    assert in_thread(lambda: shows(fetched, tokens))
    assert in_thread(lambda: shows(layer.keys_and_values(), tokens))


def test_the_last_reference_may_go_in_any_thread() -> None:
    pool = make_pool()
    layers = [make_layer(make_group(pool, i)) for i in range(4)]
    for i in range(4):
        layers[i].update_and_fetch(*Tokens(i).next(9))

    def drop() -> None:
        layers.clear()
        gc.collect()

    in_thread(drop)
    assert pool.stats.blocks_in_use() == 0


def test_threads_with_a_cache_each_share_a_pool() -> None:
    pool = make_pool(512)

    def generate(owner: int) -> bool:
        right = True
        for round_number in range(4):
            layer, tokens = make_layer(make_group(pool, owner)), Tokens(owner * 7 + round_number)
            for n in (9, 1, 1, 1, 5, 1):
                fetched = layer.update_and_fetch(*tokens.next(n))
                mx.async_eval(*fetched)
            layer.trim(3)
            tokens.trim(3)
            fetched = layer.update_and_fetch(*tokens.next(2))
            right = right and shows(fetched, tokens)
        return right

    results: list[bool] = []
    threads = [threading.Thread(target=lambda i=i: results.append(generate(i))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert pool.stats.blocks_in_use() == 0
    pool.check_invariants()


@pytest.mark.skipif(
    extension.default_backend() == "cuda", reason="a child of fork() cannot use CUDA, nor MLX on it"
)
def test_a_child_of_fork_may_use_the_books_and_drop_its_caches() -> None:
    pool = make_pool()
    layer, tokens = make_layer(make_group(pool)), Tokens()
    reader = layer.update_and_fetch(*tokens.next(13))
    mx.eval(layer.order)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            twin = layer.fork(make_group(pool, 2))
            twin.trim(2)
            del twin, reader
            layer.reset()
            code = 0 if pool.stats.blocks_in_use() == 0 else 2
            pool.allocate("k", 20, owner=3)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shows(reader, tokens)
    assert shows(layer.update_and_fetch(*tokens.next(1)), tokens)
