"""Pages of codes on the backend of MLX's default device: numbers of any size, copies, gathers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kvpool._mlx_module import extension
from paged_layers import make_group, make_layer, make_pool

HEADS, DIM, SCALE = 2, 128, 0.1


def rows(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def layer_of(format: str, pool: Any = None, dim: int = DIM) -> Any:
    group = make_group(make_pool(256, 16) if pool is None else pool)
    return make_layer(group, heads=HEADS, key_dim=dim, value_dim=dim, format=format)


def doubles(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def in_doubles(queries: mx.array, keys: mx.array, values: mx.array) -> np.ndarray:
    q, k, v = (doubles(x)[0] for x in (queries, keys, values))
    k, v = (np.repeat(x, q.shape[0] // x.shape[0], axis=0) for x in (k, v))
    scores = np.einsum("hqd,htd->hqt", q, k) * SCALE
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqt,htd->hqd", weights / weights.sum(-1, keepdims=True), v)[None]


def check(layer: Any, queries: mx.array, tolerance: float = 3e-4) -> None:
    """Each group of 64 dims by itself, so that a small one counts as much as a large one."""
    keys, values = layer.keys_and_values()
    answer = extension.attend(queries, keys, values, SCALE)
    assert isinstance(answer, mx.array), answer
    right = in_doubles(queries, *layer.keys_and_values())
    for first in range(0, DIM, 64):
        group = slice(first, first + 64)
        error = doubles(answer)[..., group] - right[..., group]
        assert np.linalg.norm(error) < tolerance * np.linalg.norm(right[..., group])


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0, 1e4])
def test_values_of_any_size(format: str, size: float) -> None:
    layer = layer_of(format)
    layer.update_and_fetch(rows(1, 1, HEADS, 700, DIM), size * rows(2, 1, HEADS, 700, DIM))
    check(layer, rows(3, 1, 8, 1, DIM))


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("size", [1e-4, 1e3])
def test_keys_of_any_size(format: str, size: float) -> None:
    layer = layer_of(format)
    layer.update_and_fetch(size * rows(1, 1, HEADS, 700, DIM), rows(2, 1, HEADS, 700, DIM))
    check(layer, rows(3, 1, 8, 1, DIM) / size)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_groups_of_unlike_scale(format: str) -> None:
    layer = layer_of(format)
    scales = mx.concatenate([mx.full((64,), 1e-3), mx.full((64,), 1e3)])
    keys, values = rows(1, 1, HEADS, 700, DIM), rows(2, 1, HEADS, 700, DIM)
    layer.update_and_fetch(keys * scales, values * scales[::-1])
    check(layer, rows(3, 1, 8, 1, DIM) / scales)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_tokens_of_unlike_scale(format: str) -> None:
    layer = layer_of(format)
    sizes = mx.exp(3 * rows(5, 1, 1, 700, 1))
    layer.update_and_fetch(rows(1, 1, HEADS, 700, DIM), sizes * rows(2, 1, HEADS, 700, DIM))
    check(layer, rows(3, 1, 8, 1, DIM))


@pytest.mark.parametrize("format", ["int8", "int4", "int3", "int2"])
@pytest.mark.parametrize("dim", [80, 128])
def test_a_fork_that_writes_keeps_the_codes_that_it_shared(format: str, dim: int) -> None:
    # Numbers that would change if they were decoded and encoded again.
    for shift, size in ((1000.0, 1.0), (100.0, 0.1)):
        pool = make_pool(64, 16)
        layer = layer_of(format, pool, dim)
        pair = [shift + size * rows(seed, 1, HEADS, 20, dim) for seed in (1, 2)]
        layer.update_and_fetch(*pair)
        before = [np.array(x) for x in layer.keys_and_values()]
        twin = layer.fork(make_group(pool, 7))
        both = twin.update_and_fetch(*(x[:, :, :3] for x in pair))
        for shown, was, mine in zip(both, before, layer.keys_and_values(), strict=True):
            assert np.array_equal(np.array(shown)[:, :, :20], was)
            assert np.array_equal(np.array(mine), was)


@pytest.mark.parametrize("dim", [6, 10, 70])
def test_a_batch_gathers_rows_that_start_anywhere(dim: int) -> None:
    pool = make_pool(64, 16)
    layers, tokens = [], []
    for owner, n in enumerate((3, 5, 5)):
        layers.append(
            make_layer(make_group(pool, owner), heads=1, key_dim=dim, value_dim=dim, format="bf16")
        )
        pair = [rows(10 * owner + i, 1, 1, n, dim).astype(mx.bfloat16) for i in range(2)]
        layers[-1].update_and_fetch(*pair)
        tokens.append(pair)
    for i, gathered in enumerate(extension.fetch_batch(layers)):
        for row, pair in zip(gathered, tokens, strict=True):
            n = pair[i].shape[2]
            assert mx.array_equal(row[:, -n:], pair[i][0])
            assert not mx.any(row[:, :-n]).item()
