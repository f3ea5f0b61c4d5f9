"""Pages in the memory of an NVIDIA GPU: appends, gathers and attention there.

Attention is compared with numpy in double precision over the numbers that the pages hold, and what
they hold with a pool of the same tokens in system memory.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kvpool._mlx_module import extension
from paged_layers import Tokens, make_group, make_layer, make_pool

pytestmark = pytest.mark.skipif(
    extension.default_backend() != "cuda",
    reason=f"no CUDA device: {extension.describe_backend('cuda')}",
)

# What is left of a sum in half precision; fp32 outputs are held to the second.
HALF, SINGLE = 4e-3, 3e-4
TIERS: dict[str, tuple[str, list[tuple[str, int]]]] = {
    "bf16": ("bf16", []),
    "fp16": ("fp16", []),
    "int8": ("int8", []),
    "int4": ("int4", []),
    "codes": ("int8", [("int4", 100)]),
    "aging": ("bf16", [("int8", 64), ("int4", 256)]),
    "aging fp16": ("fp16", [("int4", 128)]),
}


def layer_with(
    name: str, heads: int = 2, dim: int = 128, block_size: int = 16, window: int = 0, **config: Any
) -> Any:
    recent, tiers = TIERS[name]
    pool = make_pool(4096, block_size, **config)
    return make_layer(
        make_group(pool),
        heads=heads,
        key_dim=dim,
        value_dim=dim,
        format=recent,
        tiers=tiers,
        window=window,
    )


def rows(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    random = np.random.default_rng(seed)
    return mx.array(random.standard_normal(shape, dtype=np.float32)).astype(dtype)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def expected(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array | None = None
) -> np.ndarray:
    q, k, v = numbers(queries), numbers(keys), numbers(values)
    ratio = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, ratio, axis=1), np.repeat(v, ratio, axis=1)
    scores = np.einsum("bhqd,bhtd->bhqt", q, k) * scale
    largest = scores.max(-1, keepdims=True)
    if sinks is not None:
        logits = numbers(sinks)[None, :, None, None]
        largest = np.maximum(largest, logits)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(logits - largest)
    return np.einsum("bhqt,bhtd->bhqd", weights / total, v)


def check(
    queries: mx.array,
    fetched: tuple[mx.array, mx.array],
    again: tuple[mx.array, mx.array],
    sinks: mx.array | None = None,
) -> None:
    scale = queries.shape[3] ** -0.5
    answer = extension.attend(queries, *fetched, scale, sinks=sinks)
    assert isinstance(answer, mx.array), answer
    right = expected(queries, *again, scale, sinks)
    error = np.linalg.norm(numbers(answer) - right) / np.linalg.norm(right)
    assert error < (SINGLE if answer.dtype == mx.float32 else HALF)


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("n_tokens", [1, 16, 17, 500, 3000])
def test_attention_reads_pages_of_every_format(name: str, n_tokens: int) -> None:
    layer = layer_with(name)
    fetched = layer.update_and_fetch(rows(1, 1, 2, n_tokens, 128), rows(2, 1, 2, n_tokens, 128))
    check(rows(3, 1, 8, 1, 128), fetched, layer.keys_and_values())


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("name", ["bf16", "int4", "aging"])
def test_attention_over_every_block_size(name: str, block_size: int) -> None:
    layer = layer_with(name, block_size=block_size)
    fetched = layer.update_and_fetch(rows(1, 1, 2, 700, 128), rows(2, 1, 2, 700, 128))
    check(rows(3, 1, 8, 1, 128), fetched, layer.keys_and_values())


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 8, 12, 16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_grouped_queries_and_head_dims(ratio: int, dim: int) -> None:
    for name in ("fp16", "int8", "int4"):
        layer = layer_with(name, dim=dim)
        fetched = layer.update_and_fetch(rows(1, 1, 2, 300, dim), rows(2, 1, 2, 300, dim))
        check(rows(3, 1, 2 * ratio, 1, dim), fetched, layer.keys_and_values())


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_every_dtype_of_queries(dtype: mx.Dtype) -> None:
    for name in ("fp16", "bf16", "int4"):
        layer = layer_with(name)
        keys, values = (rows(seed, 1, 2, 300, 128, dtype=dtype) for seed in (1, 2))
        fetched = layer.update_and_fetch(keys, values)
        assert extension.attend(rows(3, 1, 8, 1, 128, dtype=dtype), *fetched, 0.1).dtype == dtype
        queries = rows(3, 1, 8, 1, 128, dtype=dtype)
        if dtype == mx.float32:
            check(queries, fetched, layer.keys_and_values())
            check(40 * queries, fetched, layer.keys_and_values())


@pytest.mark.parametrize("name", ["bf16", "int8", "aging"])
def test_tokens_one_by_one(name: str) -> None:
    layer = layer_with(name)
    layer.update_and_fetch(rows(1, 1, 2, 250, 128), rows(2, 1, 2, 250, 128))
    for step in range(80):
        keys, values = (rows(s + 2 * step, 1, 2, 1, 128) for s in (100, 101))
        fetched = layer.update_and_fetch(keys, values)
        if step % 9 == 0:
            check(rows(3, 1, 8, 1, 128), fetched, layer.keys_and_values())


def test_sinks() -> None:
    layer = layer_with("bf16")
    fetched = layer.update_and_fetch(rows(1, 1, 2, 2000, 128), rows(2, 1, 2, 2000, 128))
    check(rows(3, 1, 8, 1, 128), fetched, layer.keys_and_values(), 3 * rows(4, 8))


@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_a_window_hides_what_its_pages_still_hold(name: str) -> None:
    layer = layer_with(name, window=100)
    for n in (300, 1, 1, 1):
        fetched = layer.update_and_fetch(rows(n, 1, 2, n, 128), rows(n + 1, 1, 2, n, 128))
    assert fetched[0].shape[2] == 100
    check(rows(3, 1, 8, 1, 128), fetched, layer.keys_and_values())


@pytest.mark.parametrize("name", ["bf16", "int4", "aging"])
def test_a_ragged_batch(name: str) -> None:
    recent, tiers = TIERS[name]
    pool = make_pool(8192, 16)
    lengths = [1, 16, 33, 1000, 257, 90]
    layers = []
    for owner, n in enumerate(lengths):
        layers.append(
            make_layer(
                make_group(pool, owner),
                heads=2,
                key_dim=128,
                value_dim=128,
                format=recent,
                tiers=tiers,
            )
        )
        layers[-1].update_and_fetch(rows(n, 1, 2, n, 128), rows(n + 1, 1, 2, n, 128))
    queries = rows(3, len(lengths), 8, 1, 128)
    answer = extension.attend(queries, *extension.fetch_batch(layers), 0.1)
    assert isinstance(answer, mx.array), answer
    padded = extension.fetch_batch(layers)
    for i, (layer, n) in enumerate(zip(layers, lengths, strict=True)):
        keys, values = layer.keys_and_values()
        assert mx.array_equal(padded[0][i : i + 1, :, -n:], keys)
        assert not padded[0][i, :, : max(lengths) - n].any()
        right = expected(queries[i : i + 1], keys, values, 0.1)
        error = np.linalg.norm(numbers(answer[i : i + 1]) - right) / np.linalg.norm(right)
        assert error < SINGLE


@pytest.mark.parametrize("format", ["fp32", "fp16", "bf16", "int8", "int4", "int3", "int2"])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_pages_hold_what_they_hold_in_system_memory(format: str, dim: int) -> None:
    keys, values = rows(1, 1, 3, 77, dim), 5 * rows(2, 1, 3, 77, dim)
    shown = []
    for backend in ("cuda", "cpu"):
        pool = make_pool(256, 8)
        extension.PagedPool.of(pool, backend=backend)
        layer = make_layer(make_group(pool), heads=3, key_dim=dim, value_dim=dim, format=format)
        layer.update_and_fetch(keys[:, :, :50], values[:, :, :50])
        shown.append(
            [np.array(x) for x in layer.update_and_fetch(keys[:, :, 50:], values[:, :, 50:])]
        )
    for gpu, cpu in zip(*shown, strict=True):
        assert np.array_equal(gpu, cpu)


def test_demotion_gives_the_bytes_that_it_gives_in_system_memory() -> None:
    shown = []
    for backend in ("cuda", "cpu"):
        pool = make_pool(512, 16)
        extension.PagedPool.of(pool, backend=backend)
        layer = make_layer(
            make_group(pool),
            heads=2,
            key_dim=64,
            value_dim=64,
            format="fp16",
            tiers=[("int8", 32), ("int4", 64)],
        )
        for step in range(20):
            layer.update_and_fetch(rows(step, 1, 2, 11, 64), rows(step + 99, 1, 2, 11, 64))
        shown.append([np.array(x) for x in layer.keys_and_values()])
    for gpu, cpu in zip(*shown, strict=True):
        assert np.array_equal(gpu, cpu)


def test_forks_and_trims() -> None:
    pool = make_pool(256, 16)
    layer = make_layer(make_group(pool), heads=2, key_dim=128, value_dim=128, format="bf16")
    layer.update_and_fetch(rows(1, 1, 2, 100, 128), rows(2, 1, 2, 100, 128))
    twin = layer.fork(make_group(pool, 7))
    fork = twin.update_and_fetch(rows(7, 1, 2, 5, 128), rows(8, 1, 2, 5, 128))
    layer.trim(30)
    fetched = layer.update_and_fetch(rows(5, 1, 2, 40, 128), rows(6, 1, 2, 40, 128))
    check(rows(3, 1, 8, 1, 128), fetched, layer.keys_and_values())
    check(rows(3, 1, 8, 1, 128), fork, twin.keys_and_values())


def test_answers_do_not_change_from_run_to_run() -> None:
    layer = layer_with("aging")
    layer.update_and_fetch(rows(1, 1, 2, 5000, 128), rows(2, 1, 2, 5000, 128))
    queries = rows(3, 1, 8, 1, 128)
    first, *others = (
        np.array(extension.attend(queries, *layer.keys_and_values(), 0.1)) for _ in range(20)
    )
    assert all(np.array_equal(first, other) for other in others)


def test_many_layers_in_one_evaluation() -> None:
    pool = make_pool(4096, 16)
    group = make_group(pool)
    layers = [
        make_layer(group, heads=2, key_dim=64, value_dim=64, format="fp16") for _ in range(24)
    ]
    tokens = [
        Tokens(i, heads=2, key_dim=64, value_dim=64, dtype=mx.float16) for i in range(len(layers))
    ]
    for n in (37, 1, 1, 20, 1):
        x = rows(n, 1, 8, n, 64, dtype=mx.float16)
        y = x
        for layer, own in zip(layers, tokens, strict=True):
            keys, values = layer.update_and_fetch(*own.next(n))
            answer = extension.attend(x, keys, values, 0.125)
            if isinstance(answer, str):
                assert n > 1
                answer = mx.fast.scaled_dot_product_attention(x, keys, values, scale=0.125)
            x = x + answer
            y = y + mx.fast.scaled_dot_product_attention(y, own.keys, own.values, scale=0.125)
        assert np.allclose(np.array(x), np.array(y), atol=0.05)


def test_blocks_come_back_when_readers_are_gone() -> None:
    pool = make_pool(64, 16)
    for _ in range(20):
        group = make_group(pool)
        layer = make_layer(group, heads=2, key_dim=128, value_dim=128, format="bf16")
        fetched = layer.update_and_fetch(rows(1, 1, 2, 500, 128), rows(2, 1, 2, 500, 128))
        answer = extension.attend(rows(3, 1, 8, 1, 128), *fetched, 0.1)
        mx.async_eval(answer)
        group.release()
        del fetched, layer
        right = np.array(answer)
        assert np.isfinite(right).all()
    del answer
    mx.synchronize()
    assert pool.stats.blocks_in_use() == 0


@pytest.mark.parametrize("what", ["release", "reset", "trim", "free_all", "collect", "fork"])
def test_a_lazy_reader_is_not_disturbed(what: str) -> None:
    pool = make_pool(128, 16)
    group = make_group(pool)
    layer = make_layer(group, heads=2, key_dim=64, value_dim=64, format="fp16")
    tokens = Tokens(heads=2, key_dim=64, value_dim=64, dtype=mx.float16)
    fetched = layer.update_and_fetch(*tokens.next(45))
    queries = rows(3, 1, 8, 1, 64, dtype=mx.float16)
    answer = extension.attend(queries, *fetched, 0.125)
    if what == "release":
        group.release()
    elif what == "reset":
        layer.reset()
    elif what == "free_all":
        pool.free_all(group.owner)
    elif what == "collect":
        del layer
    elif what == "trim":
        layer.trim(40)
        mx.async_eval(layer.update_and_fetch(*(9 * x for x in tokens.copy(4).next(40))))
    else:
        twin = layer.fork(make_group(pool, 2))
        mx.async_eval(twin.update_and_fetch(*(9 * x for x in tokens.copy(4).next(40))))
        mx.async_eval(layer.update_and_fetch(*(9 * x for x in tokens.copy(5).next(40))))
    other = make_layer(make_group(pool, 9), heads=2, key_dim=64, value_dim=64, format="fp16")
    mx.eval(other.update_and_fetch(*Tokens(8, heads=2, key_dim=64, value_dim=64).next(400)))
    right = expected(queries, tokens.keys, tokens.values, 0.125)
    assert np.linalg.norm(numbers(answer) - right) / np.linalg.norm(right) < HALF
    pool.check_invariants()
