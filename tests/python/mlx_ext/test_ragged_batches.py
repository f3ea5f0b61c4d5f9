"""Batches of sequences that differ: in length, whose padding has a mask, and in what pages hold.

On the backend of MLX's default device: on a GPU the same tests run its kernels.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kvpool._mlx_module import extension
from paged_layers import make_group, make_layer, make_pool

HEADS, DIM, SCALE = 2, 64, 0.125
LENGTHS = (17, 1, 90, 33)


def rows(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def make_layers(
    lengths: tuple[int, ...] = LENGTHS,
    formats: tuple[tuple[str, list[tuple[str, int]]], ...] = (("fp16", []),),
    window: int = 0,
) -> list[Any]:
    pool = make_pool(1024, 16)
    layers = []
    for i, n in enumerate(lengths):
        format, tiers = formats[i % len(formats)]
        layer = make_layer(
            make_group(pool, i),
            heads=HEADS,
            key_dim=DIM,
            value_dim=DIM,
            format=format,
            tiers=tiers,
            window=window,
        )
        layer.update_and_fetch(rows(i, 1, HEADS, n, DIM), rows(i + 50, 1, HEADS, n, DIM))
        layers.append(layer)
    return layers


def mask_of(n_rows: list[int]) -> mx.array:
    columns = mx.arange(max(n_rows))
    first = mx.array([max(n_rows) - n for n in n_rows])
    return columns >= first[:, None, None, None]


def attend(queries: mx.array, layers: list[Any], mask: mx.array | None) -> mx.array:
    answer = extension.attend(queries, *extension.fetch_batch(layers), SCALE, mask)
    assert isinstance(answer, mx.array), answer
    return answer


def stock(queries: mx.array, layers: list[Any]) -> mx.array:
    """Each sequence alone, over what its pages show."""
    return mx.concatenate(
        [
            mx.fast.scaled_dot_product_attention(
                queries[i : i + 1], *layer.keys_and_values(), scale=SCALE
            )
            for i, layer in enumerate(layers)
        ]
    )


@pytest.mark.parametrize("window", [0, 20])
def test_a_mask_of_padding_alone_is_not_looked_at(window: int) -> None:
    layers = make_layers(window=window)
    if window:  # what a chunk left behind the window goes with the next token
        for i, layer in enumerate(layers):
            layer.update_and_fetch(rows(i + 7, 1, HEADS, 1, DIM), rows(i + 8, 1, HEADS, 1, DIM))
    n_rows = [layer.n_rows for layer in layers]
    queries = rows(99, len(layers), 4, 1, DIM)
    # One that would hide all: who looks at it is wrong.
    mask = extension.padding_mask(mx.zeros(mask_of(n_rows).shape, dtype=mx.bool_), n_rows)
    assert mx.allclose(attend(queries, layers, mask), stock(queries, layers), atol=2e-3)


def test_elsewhere_it_is_a_mask_like_any() -> None:
    layers = make_layers()
    n_rows = [layer.n_rows for layer in layers]
    plain = mask_of(n_rows)
    mask = extension.padding_mask(plain, n_rows)
    assert mask.shape == plain.shape and mask.dtype == mx.bool_
    queries = rows(99, len(layers), 4, 1, DIM)
    keys, values = extension.fetch_batch(layers)
    ordinary = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask)
    assert mx.allclose(ordinary, stock(queries, layers), atol=2e-3)
    assert mx.array_equal(mask, plain)
    # Evaluated, it says no more where it comes from.
    assert mx.allclose(mx.where(mask, 1, 0), mx.where(plain, 1, 0))


@pytest.mark.skipif(extension.default_backend() != "cpu", reason="the CPU's kernels take masks")
def test_a_mask_for_other_sequences_is_looked_at() -> None:
    layers = make_layers((20, 20))
    queries = rows(99, 2, 4, 1, DIM)
    hidden = mx.zeros((2, 1, 1, 20), dtype=mx.bool_)
    for n_rows in ([20, 19], [19, 20]):
        answer = attend(queries, layers, extension.padding_mask(hidden, n_rows))
        assert not mx.allclose(answer, stock(queries, layers), atol=2e-3)


def test_the_arguments_of_a_padding_mask_are_checked() -> None:
    mask = mask_of([3, 5])
    message = r"\[padding_mask\] mask must be of booleans \[2, 1, 1, 4\], got bool of 4 dims"
    with pytest.raises(ValueError, match=message):
        extension.padding_mask(mask, [3, 4])
    with pytest.raises(ValueError, match="got int32 of 4 dims"):
        extension.padding_mask(mask.astype(mx.int32), [3, 5])
    with pytest.raises(ValueError, match=r"\[3, 1, 1, 5\]"):
        extension.padding_mask(mask, [3, 5, 1])


MIXES = {
    "halves": (("fp16", []), ("bf16", [])),
    "halves and codes": (("fp16", []), ("int4", []), ("int8", [])),
    "ages": (("int8", []), ("bf16", [("int8", 16), ("int4", 48)]), ("int4", [])),
}


@pytest.mark.parametrize("name", MIXES)
def test_sequences_of_a_batch_may_hold_different_formats(name: str) -> None:
    layers = make_layers((17, 200, 90, 33, 120), MIXES[name])
    queries = rows(99, len(layers), 4, 1, DIM)
    for _ in range(2):
        assert mx.allclose(attend(queries, layers, None), stock(queries, layers), atol=2e-3)
        layers.reverse()
        queries = queries[::-1]


def test_more_sequences_than_a_launch_takes() -> None:
    layers = make_layers(tuple(1 + 3 * i % 70 for i in range(130)))
    queries = rows(99, len(layers), 4, 1, DIM)
    assert mx.allclose(attend(queries, layers, None), stock(queries, layers), atol=2e-3)


def test_a_batch_is_appended_without_cutting_it_up() -> None:
    layers, alone = make_layers(), make_layers()
    counts = [3, 0, 1, 2]
    wide = rows(5, len(layers), 3, HEADS, 2 * DIM)
    keys = wide[..., ::2].swapaxes(1, 2)  # not dense along the dims
    values = rows(6, len(layers), HEADS, 3, DIM)
    extension.append_batch(layers, keys, values, counts)
    fetched = extension.fetch_batch(layers)
    for i, (layer, n) in enumerate(zip(alone, counts, strict=True)):
        if n:
            layer.update_and_fetch(keys[i : i + 1, :, :n], values[i : i + 1, :, :n])
    for got, right in zip(fetched, extension.fetch_batch(alone), strict=True):
        assert mx.array_equal(got, right)
    assert [layer.offset for layer in layers] == [layer.offset for layer in alone]


def test_a_batch_that_does_not_fit_its_layers_is_refused() -> None:
    layers = make_layers()
    keys = rows(5, len(layers), HEADS, 2, DIM)
    where = r"^\[PagedLayer::update_and_fetch\] "
    with pytest.raises(ValueError, match=r"^\[append_batch\] counts must be of 4 layers, got 3"):
        extension.append_batch(layers, keys, keys, [1, 1, 1])
    with pytest.raises(ValueError, match=where + r"tokens to append must be from 1 to 2, got 3"):
        extension.append_batch(layers, keys, keys, [3, 1, 1, 1])
    with pytest.raises(ValueError, match=where + r"keys must be of shape \[4, 2, 2, 64\]"):
        extension.append_batch(layers, keys[:3], keys[:3], [1, 1, 1, 1])
    with pytest.raises(ValueError, match=where + r"values must be of shape \[4, 2, 2, 64\]"):
        extension.append_batch(layers, keys, keys[:, :, :1], [1, 1, 1, 1])
    with pytest.raises(ValueError, match=r"^\[append_batch\] layers must be PagedLayers, got None"):
        extension.append_batch([None, *layers[1:]], keys, keys, [1, 1, 1, 1])
    assert [layer.offset for layer in layers] == list(LENGTHS)
