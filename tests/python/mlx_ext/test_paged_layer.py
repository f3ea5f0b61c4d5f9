"""A paged layer of arrays: what is appended is what is gathered."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from kvpool import BlockPoolExhaustedError
from kvpool._mlx_module import extension
from paged_layers import (
    HEADS,
    KEY_DIM,
    VALUE_DIM,
    Tokens,
    make_group,
    make_layer,
    make_pool,
    same,
    shows,
)


@pytest.mark.parametrize("block_size", [1, 8, 32])
@pytest.mark.parametrize("steps", [[1], [7, 1, 1], [8, 8], [9, 1, 23, 1], [1] * 17, [40]])
def test_what_is_appended_is_gathered(block_size: int, steps: list[int]) -> None:
    layer = make_layer(make_group(make_pool(block_size=block_size)))
    tokens = Tokens()
    for n in steps:
        assert shows(layer.update_and_fetch(*tokens.next(n)), tokens)
        assert layer.offset == tokens.keys.shape[2]
    assert shows(layer.keys_and_values(), tokens)


def test_appends_that_nobody_evaluates_one_by_one_are_all_there() -> None:
    layer, tokens = make_layer(), Tokens()
    for n in (5, 1, 1, 12, 1):
        fetched = layer.update_and_fetch(*tokens.next(n))
    assert shows(fetched, tokens)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_arrays_come_back_in_the_dtype_they_came_in(dtype: mx.Dtype, name: str) -> None:
    layer, tokens = make_layer(format=name), Tokens(dtype=dtype)
    keys, values = layer.update_and_fetch(*tokens.next(11))
    page = {"fp32": mx.float32, "fp16": mx.float16, "bf16": mx.bfloat16}[name]
    assert same(keys, tokens.keys.astype(page).astype(dtype))
    assert same(values, tokens.values.astype(page).astype(dtype))


def test_any_strides_will_do() -> None:
    layer, tokens = make_layer(), Tokens()
    keys, values = tokens.next(5)
    swapped = mx.contiguous(keys.swapaxes(1, 2)).swapaxes(1, 2)
    turned = mx.contiguous(values.swapaxes(2, 3)).swapaxes(2, 3)
    mx.eval(swapped, turned)
    assert shows(layer.update_and_fetch(swapped, turned), tokens)
    keys, values = tokens.next(3)
    assert shows(
        layer.update_and_fetch(
            mx.repeat(keys, 2, axis=3)[..., ::2], mx.concatenate([values, values], axis=2)[:, :, :3]
        ),
        tokens,
    )


def test_numbers_that_are_computed_lazily_are_waited_for() -> None:
    layer, tokens = make_layer(), Tokens()
    keys, values = tokens.next(6)
    fetched = layer.update_and_fetch(mx.exp(mx.log(keys * keys) / 2) * mx.sign(keys), values + 0)
    assert np.allclose(fetched[0], tokens.keys, rtol=1e-5)
    assert same(fetched[1], tokens.values)


def test_the_order_token_runs_the_appends_and_gathers_nothing() -> None:
    layer, tokens = make_layer(), Tokens()
    fetched = layer.update_and_fetch(*tokens.next(9))
    mx.eval(layer.order)
    del fetched
    assert shows(layer.keys_and_values(), tokens)


def test_blocks_are_charged_and_given_back() -> None:
    pool = make_pool()
    layer, tokens = make_layer(make_group(pool)), Tokens()
    layer.update_and_fetch(*tokens.next(9))
    assert (layer.n_blocks, pool.stats.blocks_in_use()) == (4, 4)
    assert layer.nbytes == 2 * 8 * HEADS * (KEY_DIM + VALUE_DIM) * 4
    layer.reset()
    assert (layer.offset, layer.n_blocks, layer.nbytes, pool.stats.blocks_in_use()) == (0, 0, 0, 0)
    assert layer.keys_and_values() is None
    tokens = Tokens(1)
    assert shows(layer.update_and_fetch(*tokens.next(3)), tokens)
    del layer
    mx.synchronize()  # a GPU gives blocks back once it has run
    assert pool.stats.blocks_in_use() == 0


def test_trimming_and_going_on_shows_the_new_tokens() -> None:
    layer, tokens = make_layer(), Tokens()
    layer.update_and_fetch(*tokens.next(21))
    assert layer.trim(7) == 7
    tokens.trim(7)
    assert layer.offset == 14
    assert shows(layer.keys_and_values(), tokens)
    assert shows(layer.update_and_fetch(*tokens.next(4)), tokens)


def test_an_exhausted_pool_leaves_the_layer_where_it_was() -> None:
    pool = make_pool(n_blocks=4)
    layer, tokens = make_layer(make_group(pool)), Tokens()
    layer.update_and_fetch(*tokens.next(10))
    keys, values = tokens.copy(1).next(7)
    with pytest.raises(BlockPoolExhaustedError) as caught:
        layer.update_and_fetch(keys, values)
    assert caught.value.tokens_that_fit == 6
    assert layer.offset == 10
    assert shows(layer.update_and_fetch(*tokens.next(6)), tokens)


def test_adopted_tokens_take_the_place_of_those_held() -> None:
    layer, tokens = make_layer(), Tokens()
    layer.update_and_fetch(*tokens.next(30))
    other = Tokens(1)
    layer.adopt(*other.next(12), 12)
    assert layer.offset == 12
    assert shows(layer.keys_and_values(), other)
    assert shows(layer.update_and_fetch(*other.next(1)), other)


@pytest.mark.parametrize("offset", [20, 21, 24, 401])
def test_what_a_window_left_is_adopted_at_its_position(offset: int) -> None:
    window = 12
    layer, tokens = make_layer(window=window), Tokens()
    layer.adopt(*tokens.next(11), offset)
    assert layer.offset == offset
    assert shows(layer.keys_and_values(), tokens)
    for n in (1, 5, 1):
        keys, values = layer.update_and_fetch(*tokens.next(n))
        offset += n
        rows = min(tokens.keys.shape[2], window - 1 + n)
        assert same(keys, tokens.keys[:, :, -rows:])
        assert same(values, tokens.values[:, :, -rows:])
    assert layer.offset == offset


def test_a_released_group_begins_at_the_first_position_again() -> None:
    layer = make_layer(window=12)
    layer.adopt(*Tokens().next(11), 401)
    layer.group.release()
    assert layer.offset == 0 and layer.keys_and_values() is None
    tokens = Tokens(1)
    assert shows(layer.update_and_fetch(*tokens.next(9)), tokens)


@pytest.mark.parametrize("offset", [4, 11])
def test_a_position_past_the_tokens_needs_a_window(offset: int) -> None:
    layer, tokens = make_layer(), Tokens()
    with pytest.raises(ValueError, match=r"offset must be the 3 tokens of keys without a window"):
        layer.adopt(*tokens.next(3), offset)
    with pytest.raises(ValueError, match=r"^\[PagedLayer::adopt\] offset must be >= the 3 tokens"):
        layer.adopt(*tokens.next(3), 2)
    assert layer.offset == 0


@pytest.mark.parametrize("offset", [9, 40])
def test_what_a_window_left_is_all_that_the_next_query_sees(offset: int) -> None:
    """Else a trim would reach behind the first token: a file that lies about its offset."""
    layer, tokens = make_layer(window=100), Tokens()
    assert shows(layer.update_and_fetch(*tokens.next(3)), tokens)
    with pytest.raises(ValueError, match=r"keys must have the 99 tokens before offset"):
        layer.adopt(*Tokens(1).next(5), offset)
    assert shows(layer.keys_and_values(), tokens)
    assert layer.trim(3) == 3


@pytest.mark.parametrize("steps", [[5] + [1] * 40, [30, 1, 1], [20, 20, 5, 1], [12] * 4])
def test_a_window_shows_what_the_queries_of_a_step_may_see(steps: list[int]) -> None:
    window = 12
    layer, tokens = make_layer(window=window), Tokens()
    for n in steps:
        keys, values = layer.update_and_fetch(*tokens.next(n))
        rows = min(tokens.keys.shape[2], window - 1 + n)
        assert same(keys, tokens.keys[:, :, -rows:])
        assert same(values, tokens.values[:, :, -rows:])
        assert layer.n_rows == rows
    assert layer.offset == tokens.keys.shape[2]
    assert layer.n_blocks <= 2 * (2 + (window + steps[-1]) // 8)


def test_field_F14_a_window_grows_by_no_more_than_a_chunk() -> None:
    layer, tokens = make_layer(window=8), Tokens()
    widths = [layer.update_and_fetch(*tokens.next(n))[0].shape[2] for n in (8, 3, 3, 3, 1)]
    assert widths == [8, 10, 10, 10, 8]


def test_older_blocks_are_kept_in_fewer_bits() -> None:
    layer = make_layer(format="fp16", tiers=[("int8", 8)], key_dim=64, value_dim=64)
    tokens = Tokens(key_dim=64, value_dim=64, dtype=mx.float16)
    exact = 0
    for n in (20, 1, 1, 30, 1):
        before = layer.nbytes
        keys, _ = layer.update_and_fetch(*tokens.next(n))
        mx.eval(keys)
        exact += layer.nbytes - before
    recent = tokens.keys.shape[2] - 8
    assert same(keys[:, :, recent:], tokens.keys[:, :, recent:])
    assert not same(keys[:, :, :8], tokens.keys[:, :, :8])
    assert np.allclose(keys, tokens.keys, atol=0.03)
    assert layer.nbytes < 0.8 * 2 * 56 * HEADS * 64 * 2


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (
            (1, 3, 4, 16),
            (1, 2, 4, 8),
            r"keys must be of shape \[1, 2, 4, 16\], got \[1, 3, 4, 16\]",
        ),
        ((2, 2, 4, 16), (2, 2, 4, 8), "keys must be of shape"),
        ((1, 2, 0, 16), (1, 2, 0, 8), r"\[1, 2, >= 1, 16\], got \[1, 2, 0, 16\]"),
        ((2, 4, 16), (2, 4, 8), "keys must be of shape"),
        ((1, 2, 4, 16), (1, 2, 5, 8), r"values must be of shape \[1, 2, 4, 8\]"),
        ((1, 2, 4, 16), (1, 2, 4, 16), "values must be of shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    keys: tuple[int, ...], values: tuple[int, ...], message: str
) -> None:
    layer = make_layer()
    with pytest.raises(ValueError, match=r"^\[PagedLayer::update_and_fetch\] .*" + message):
        layer.update_and_fetch(mx.zeros(keys), mx.zeros(values))
    assert (layer.offset, layer.n_blocks) == (0, 0)


def test_integers_are_refused() -> None:
    shape = (1, HEADS, 1)
    with pytest.raises(ValueError, match=r"keys must be of float32.*got int32"):
        make_layer().update_and_fetch(
            mx.zeros((*shape, KEY_DIM), mx.int32), mx.zeros((*shape, VALUE_DIM))
        )


def test_a_format_that_no_page_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^\[StreamFormat\] a format must be one of .*got int7"):
        extension.StreamFormat("int7")


def test_the_byte_budget_is_set_once() -> None:
    pool = make_pool()
    paged = extension.PagedPool.of(pool, byte_budget=10_000)
    layer, tokens = make_layer(make_group(pool)), Tokens()
    layer.update_and_fetch(*tokens.next(24))
    assert paged.used_bytes == layer.nbytes <= paged.committed_bytes
    with pytest.raises(BlockPoolExhaustedError) as caught:
        layer.update_and_fetch(*tokens.copy(1).next(40))
    assert (caught.value.owner, caught.value.stream, caught.value.needed) == (1, None, None)
    assert caught.value.available_bytes < caught.value.needed_bytes <= 10_000
    assert caught.value.tokens_that_fit == 24
    with pytest.raises(
        ValueError, match=r"^\[PagedPool::of\] byte_budget and n_threads are set once"
    ):
        extension.PagedPool.of(pool, byte_budget=20_000)
    assert extension.PagedPool.of(pool).byte_budget == 10_000
    assert shows(layer.keys_and_values(), tokens)


def test_what_is_no_pool_is_refused() -> None:
    with pytest.raises(TypeError, match=r"\[PagedPool::of\] pool must be a BlockPoolAllocator"):
        extension.PagedGroup(object(), 1)
