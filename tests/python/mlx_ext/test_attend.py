"""Attention over pages answers what mlx.core.fast answers over the dense arrays."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kvpool._mlx_module import extension
from paged_layers import Tokens, make_group, make_layer, make_pool

SCALE = 0.2


def queries_for(
    n: int, *, heads: int = 4, dim: int = 16, batch: int = 1, dtype: mx.Dtype = mx.float32
) -> mx.array:
    random = np.random.default_rng(99)
    shape = (batch, heads, n, dim)
    return mx.array(random.standard_normal(shape, dtype=np.float32)).astype(dtype)


def stock(queries: mx.array, tokens: Tokens, mask: Any = None, sinks: Any = None) -> mx.array:
    return mx.fast.scaled_dot_product_attention(
        queries, tokens.keys, tokens.values, scale=SCALE, mask=mask, sinks=sinks
    )


def close(a: mx.array, b: mx.array, tolerance: float = 2e-6) -> bool:
    assert a.shape == b.shape and a.dtype == b.dtype
    return np.allclose(a.astype(mx.float32), b.astype(mx.float32), atol=tolerance, rtol=tolerance)


def filled(n: int, **config: Any) -> tuple[Any, Tokens, tuple[mx.array, mx.array]]:
    layer, tokens = make_layer(**config), Tokens()
    return layer, tokens, layer.update_and_fetch(*tokens.next(n))


@pytest.mark.parametrize("n_tokens", [1, 7, 8, 9, 100])
@pytest.mark.parametrize("heads", [2, 4, 6])
def test_one_query(n_tokens: int, heads: int) -> None:
    _, tokens, (keys, values) = filled(n_tokens)
    queries = queries_for(1, heads=heads)
    assert close(extension.attend(queries, keys, values, SCALE), stock(queries, tokens))


@pytest.mark.parametrize("n_queries", [2, 9, 40])
@pytest.mark.parametrize("mask", [None, "causal", "boolean", "additive", "rows"])
def test_many_queries_and_masks(n_queries: int, mask: str | None) -> None:
    _, tokens, (keys, values) = filled(40)
    queries = queries_for(n_queries)
    random = np.random.default_rng(5)
    arrays = {
        "boolean": mx.array(random.random((n_queries, 40)) < 0.7),
        "additive": mx.array(random.standard_normal((1, 4, n_queries, 40), dtype=np.float32)),
        "rows": mx.array(random.standard_normal((1, 1, 1, 40), dtype=np.float32)),
    }
    chosen = arrays.get(mask, mask) if mask else None
    answer = extension.attend(queries, keys, values, SCALE, chosen)
    assert close(answer, stock(queries, tokens, chosen))


@pytest.mark.parametrize("n_queries", [1, 5])
def test_sinks(n_queries: int) -> None:
    _, tokens, (keys, values) = filled(21)
    queries = queries_for(n_queries)
    sinks = mx.array([0.5, -1.0, 2.0, 0.0])
    for given in (sinks, sinks.astype(mx.bfloat16), mx.repeat(sinks, 2)[::2]):
        answer = extension.attend(queries, keys, values, SCALE, "causal", given)
        assert close(answer, stock(queries, tokens, "causal", sinks))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision(dtype: mx.Dtype) -> None:
    name = {mx.float16: "fp16", mx.bfloat16: "bf16"}[dtype]
    layer, tokens = make_layer(format=name), Tokens(dtype=dtype)
    keys, values = layer.update_and_fetch(*tokens.next(50))
    queries = queries_for(3, dtype=dtype)
    answer = extension.attend(queries, keys, values, SCALE, "causal")
    assert close(answer, stock(queries, tokens, "causal"), 0.02)


def test_queries_of_fp32_over_keys_of_fp16() -> None:
    layer, tokens = make_layer(format="fp16"), Tokens(dtype=mx.float16)
    keys, values = layer.update_and_fetch(*tokens.next(50))
    queries = queries_for(1)
    assert close(extension.attend(queries, keys, values, SCALE), stock(queries, tokens))


def test_queries_of_any_strides() -> None:
    _, tokens, (keys, values) = filled(20)
    queries = queries_for(3)
    swapped = mx.contiguous(queries.swapaxes(1, 2)).swapaxes(1, 2)
    turned = mx.contiguous(queries.swapaxes(2, 3)).swapaxes(2, 3)
    for given in (swapped, turned):
        answer = extension.attend(given, keys, values, SCALE, "causal")
        assert close(answer, stock(queries, tokens, "causal"))


def test_one_latent_as_keys_and_values() -> None:
    """Multi-head latent attention: the mask carries the scores of the rotary part."""
    layer, tokens = make_layer(heads=1, key_dim=32, value_dim=8), Tokens(1, heads=1, key_dim=32)
    latent, rotary = layer.update_and_fetch(*tokens.next(30))
    queries, rotary_queries = queries_for(1, dim=32), queries_for(1, dim=8)
    scores = (rotary_queries * SCALE) @ rotary.swapaxes(-1, -2)
    answer = extension.attend(queries, latent, latent, SCALE, scores)
    reference = mx.fast.scaled_dot_product_attention(
        queries, tokens.keys, tokens.keys, scale=SCALE, mask=scores
    )
    assert close(answer, reference)


@pytest.mark.parametrize("n_queries", [1, 6])
def test_a_window_hides_what_its_first_pages_still_hold(n_queries: int) -> None:
    layer, tokens = make_layer(window=12), Tokens()
    layer.update_and_fetch(*tokens.next(45))
    layer.update_and_fetch(*tokens.next(n_queries))
    tokens.keys, tokens.values = layer.keys_and_values()
    queries = queries_for(n_queries)
    n_rows = layer.n_rows
    ages = mx.arange(n_rows - n_queries, n_rows)[:, None] - mx.arange(n_rows)
    boolean = (ages >= 0) & (ages < 12)
    additive = mx.where(boolean, mx.array(0.5), mx.array(-1e9))
    masks = [boolean, additive, additive.astype(mx.float16)[None], boolean[None, None]]
    for mask in [None, *masks] if n_queries == 1 else masks:
        answer = extension.attend(queries, *layer.keys_and_values(), SCALE, mask)
        assert close(answer, stock(queries, tokens, mask), 1e-5)


def test_kept_in_fewer_bits_attention_reads_what_is_gathered() -> None:
    layer = make_layer(format="fp16", tiers=[("int8", 8), ("int4", 24)], key_dim=64, value_dim=64)
    tokens = Tokens(key_dim=64, value_dim=64, dtype=mx.float16)
    for n in (50, 1, 1):
        keys, values = layer.update_and_fetch(*tokens.next(n))
        mx.eval(layer.order)
    queries = queries_for(1, dim=64)
    answer = extension.attend(queries, keys, values, SCALE)
    tokens.keys, tokens.values = (x.astype(mx.float32) for x in (keys, values))
    assert close(answer, stock(queries, tokens), 5e-3)


def test_attention_leaves_the_arrays_not_evaluated() -> None:
    _, tokens, (keys, values) = filled(9)
    queries = queries_for(1)
    mx.eval(extension.attend(queries, keys, values, SCALE))
    assert close(extension.attend(queries, keys, values, SCALE), stock(queries, tokens))


def test_arrays_of_others_are_not_ours() -> None:
    _, tokens, (keys, values) = filled(9)
    queries = queries_for(1)
    assert extension.attend(queries, tokens.keys, tokens.values, SCALE) is None
    mx.eval(keys, values)
    assert extension.attend(queries, keys, values, SCALE) is None
    with pytest.raises(ValueError, match=r"^\[paged_attention\] .* must come from a paged cache"):
        extension.paged_attention(queries, keys, values, SCALE)


def test_what_the_kernels_do_not_cover_is_named() -> None:
    _, tokens, (keys, values) = filled(9)
    other = make_layer().update_and_fetch(*Tokens().next(9))
    queries = queries_for(1)

    def reason(*args: Any) -> str:
        answer = extension.attend(*args)
        assert isinstance(answer, str)
        with pytest.raises(ValueError, match=answer):
            extension.paged_attention(*args)
        return answer

    assert reason(queries, keys, tokens.values, SCALE) == "keys and values from different places"
    assert reason(queries, keys, other[1], SCALE) == "keys and values from different places"
    assert reason(queries_for(1, dim=8), keys, values, SCALE) == "shapes that do not fit"
    assert reason(queries_for(1, heads=3), keys, values, SCALE) == "shapes that do not fit"
    assert reason(queries, keys, values, SCALE, "banded") == "an unknown mask"
    integers = mx.zeros((1, 9), mx.int32)
    assert "neither boolean" in reason(queries, keys, values, SCALE, integers)
    assert reason(queries, keys, values, SCALE, mx.zeros((1, 8))) == "a mask that does not fit"
    assert reason(queries, keys, values, SCALE, None, mx.zeros(3)) == "sinks that do not fit"
    assert reason(queries_for(10), keys, values, SCALE) == "more queries than tokens"


def test_a_call_that_is_not_covered_is_right_in_plain_mlx() -> None:
    _, tokens, (keys, values) = filled(9)
    queries = queries_for(1).astype(mx.float32)
    plain = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE)
    assert close(plain, stock(queries, tokens))


def test_sequences_of_unequal_length_in_one_call() -> None:
    group = make_group(make_pool())
    lengths = (5, 24, 17)
    layers, all_tokens = [], []
    for i, n in enumerate(lengths):
        layer, tokens = make_layer(group), Tokens(i)
        layer.update_and_fetch(*tokens.next(n))
        layers.append(layer)
        all_tokens.append(tokens)
    keys, values = extension.fetch_batch(layers)
    assert keys.shape == (3, 2, 24, 16) and values.shape == (3, 2, 24, 8)
    queries = queries_for(1, batch=3)
    mask = (mx.arange(24)[None] >= mx.array([[24 - n] for n in lengths]))[:, None, None]
    answers = [extension.attend(queries, keys, values, SCALE, given) for given in (None, mask)]
    dense = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask)
    for i, tokens in enumerate(all_tokens):
        for answer in (*answers, dense):
            assert close(answer[i : i + 1], stock(queries[i : i + 1], tokens))


def test_a_batch_needs_layers_of_one_shape_that_hold_tokens() -> None:
    layer, _, _ = filled(3)
    with pytest.raises(ValueError, match=r"^\[fetch_batch\] the layers must hold tokens"):
        extension.fetch_batch([layer, make_layer()])
    wide, tokens = make_layer(heads=4), Tokens(heads=4)
    wide.update_and_fetch(*tokens.next(3))
    with pytest.raises(ValueError, match=r"^\[fetch_batch\] layers must have the same heads"):
        extension.fetch_batch([layer, wide])
    with pytest.raises(ValueError, match=r"^\[fetch_batch\] layers must not be empty"):
        extension.fetch_batch([])
