"""ExactKVCache: exact attention, in the caller's kind of array."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpool.cache import ExactKVCache

NUMPY = {"fp32": np.float32, "fp16": np.float16}


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """What the cache keeps of float32 numbers, as float64."""
    if dtype == "bf16":
        return np.asarray(mx.array(values).astype(mx.bfloat16).astype(mx.float32)).astype(float)
    return values.astype(NUMPY[dtype]).astype(float)


def attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    scores = keys @ q.astype(float) / np.sqrt(q.size)
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    head_dim=st.integers(1, 130),
    n=st.integers(1, 90),
    capacity=st.none() | st.integers(1, 100),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_is_exact_over_the_last_tokens(dtype, head_dim, n, capacity, seed):
    keys, values = normal(2, n, head_dim, seed=seed)
    cache = ExactKVCache(head_dim, dtype=dtype, capacity=capacity)
    for k, v in zip(keys, values, strict=True):
        cache.append(k, v)
    cache.check_invariants()
    kept = min(n, capacity or n)
    assert len(cache) == kept
    q = normal(head_dim, seed=seed + 1)
    expected = attention(q, rounded(keys[-kept:], dtype), rounded(values[-kept:], dtype))
    np.testing.assert_allclose(cache.attend(q), expected, atol=2e-5)


def test_several_queries_at_once_answer_like_each_alone():
    cache = ExactKVCache(16)
    for k, v in zip(*normal(2, 30, 16), strict=True):
        cache.append(k, v)
    queries = normal(5, 16, seed=2)
    together = cache.attend(queries)
    assert together.shape == (5, 16)
    assert np.array_equal(together, [cache.attend(q) for q in queries])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_an_mlx_query_gets_an_mlx_array_of_its_dtype(dtype):
    cache = ExactKVCache(8, dtype=dtype)
    row = mx.ones((8,), dtype=dtype)
    cache.append(row, row)
    output = cache.attend(row)
    assert isinstance(output, mx.array) and output.dtype == dtype
    assert output.tolist() == [1.0] * 8


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_numpy_query_gets_a_numpy_array_of_its_dtype(dtype):
    cache = ExactKVCache(8)
    cache.append(np.ones(8), [1.0] * 8)
    output = cache.attend(np.ones(8, dtype))
    assert isinstance(output, np.ndarray) and output.dtype == dtype


def test_a_list_or_integers_get_float32():
    cache = ExactKVCache(2)
    cache.append([1, 2], [3, 4])
    for query in ([1, 2], np.array([1, 2])):
        output = cache.attend(query)
        assert output.dtype == np.float32 and output.tolist() == [3.0, 4.0]


def test_an_empty_cache_answers_zeros():
    assert ExactKVCache(3).attend(np.ones(3)).tolist() == [0.0] * 3


@pytest.mark.parametrize("name", ["bf16", "bfloat16", mx.bfloat16])
def test_dtypes_have_several_names(name):
    assert ExactKVCache(4, dtype=name).dtype == "bf16"


def test_numpy_dtypes_are_names_too():
    assert ExactKVCache(4, dtype=np.float32).dtype == "fp32"
    assert ExactKVCache(4, dtype=np.dtype("float16")).dtype == "fp16"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"head_dim": 0}, ValueError, "head_dim must be >= 1, got 0"),
        ({"head_dim": 2**40}, ValueError, "head_dim must be in"),
        ({"head_dim": 4.0}, TypeError, "head_dim must be an int"),
        ({"head_dim": True}, TypeError, "head_dim must be an int"),
        ({"capacity": 0}, ValueError, "capacity must be >= 1, got 0"),
        ({"capacity": 1.5}, TypeError, "capacity must be an int"),
        ({"dtype": "int4"}, ValueError, "must be fp32, fp16 or bf16, got 'int4'"),
        ({"dtype": "fp8"}, ValueError, "must be fp32, fp16 or bf16, got 'fp8'"),
        ({"dtype": None}, ValueError, "must be fp32, fp16 or bf16"),
    ],
)
def test_constructor_arguments_are_checked(arguments, error, message):
    with pytest.raises(error, match=message):
        ExactKVCache(**{"head_dim": 4, **arguments})


def test_arrays_of_another_byte_order_are_the_numbers_they_say():
    cache = ExactKVCache(4, "fp32")
    cache.append(np.ones(4, ">f4"), np.arange(4, dtype=">f8"))
    assert cache.attend(np.ones(4, ">f4")).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e6])
def test_fault_F44_numbers_that_fp16_does_not_hold_are_refused(bad):
    cache = ExactKVCache(2, dtype="fp16")
    for append in (lambda r: cache.append_key(r), lambda r: cache.append([0, 0], r)):
        with pytest.raises(ValueError, match="must be finite in fp16"):
            append([0.0, bad])
    assert len(cache) == 0
    cache.append([1, 1], [1, 1])


@pytest.mark.parametrize("row", [np.ones((2, 4)), np.ones(3), np.float32(1), mx.ones((1, 4))])
def test_fault_F48_rows_of_another_shape_are_refused(row):
    cache = ExactKVCache(4)
    for call in (cache.append_key, cache.append_value, lambda r: cache.append(r, np.ones(4))):
        with pytest.raises(ValueError, match=r"must have shape \(4,\), got "):
            call(row)
    if row.ndim != 2:
        with pytest.raises(ValueError, match=r"q must have shape \(4,\) or \(n, 4\), got "):
            cache.attend(row)


def test_keys_and_values_out_of_turn_change_nothing():
    cache = ExactKVCache(1)
    with pytest.raises(ValueError, match="must follow its key"):
        cache.append_value([1.0])
    cache.append_key([1.0])
    with pytest.raises(ValueError, match="waits for its value"):
        cache.append_key([2.0])
    with pytest.raises(ValueError, match="waits for its value"):
        cache.append([2.0], [2.0])
    assert cache.attend([1.0]).tolist() == [0.0]
    cache.append_value([5.0])
    assert cache.attend([1.0]).tolist() == [5.0]
    cache.append_key([9.0])
    cache.discard_key()
    cache.append([1.0], [5.0])
    assert len(cache) == 2


def test_fault_F42_memory_is_what_the_tokens_take():
    cache = ExactKVCache(128, dtype="fp16")
    assert cache.memory_bytes() == 0
    for _ in range(64):
        cache.append(np.zeros(128), np.zeros(128))
    assert cache.memory_bytes() == 64 * 2 * 128 * 2
    cache.reset()
    assert len(cache) == 0
    assert "tokens=0" in repr(cache)


def test_fault_F43_a_large_capacity_takes_nothing_before_it_is_used():
    assert ExactKVCache(128, capacity=1_000_000).memory_bytes() == 0


def test_fault_F50_the_cache_needs_no_mlx():
    code = (
        "import sys, kvpool, kvpool.memory.mlx_storage\n"
        "cache = kvpool.PooledKVCache(kvpool.ExactKVCache(2), kvpool.BlockPoolAllocator())\n"
        "cache.append([1, 2], [3, 4])\n"
        "assert cache.attend([0, 0]).tolist() == [3, 4]\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('mlx', 'mlx_lm')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
