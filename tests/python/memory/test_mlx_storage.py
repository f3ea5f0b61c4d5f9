"""MLXBlockStorage: rows of numbers in the blocks of a pool."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpool.formats import FORMATS, Format
from kvpool.memory import Block, BlockPoolAllocator, MLXBlockStorage, PoolConfig

BLOCK_SIZE = 4
HEAD_DIM = 8

FLOATS = [name for name, entry in FORMATS.items() if entry.is_float]
CODES = [name for name, entry in FORMATS.items() if not entry.is_float]
DTYPES = {"fp32": mx.float32, "fp16": mx.float16, "bf16": mx.bfloat16}


@pytest.fixture
def pool() -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=BLOCK_SIZE, n_blocks=8, separate_kv=False))


@pytest.fixture
def storage(pool: BlockPoolAllocator) -> MLXBlockStorage:
    return MLXBlockStorage(pool, HEAD_DIM)


def take(pool: BlockPoolAllocator, format: str = "fp16", owner: int = 1) -> Block:
    (block,) = pool.allocate("kv", 1, owner, format)
    pool.mark_used(block, 0)
    return block


def numbers(format: Format, n: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    if format.is_float:
        return random.standard_normal((n, HEAD_DIM)).astype(np.float32)
    return random.integers(0, format.max_code + 1, (n, HEAD_DIM), dtype=np.uint8)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_rows_come_back_in_the_formats_dtype(pool, storage, format):
    block = take(pool, format.name)
    values = numbers(format, 3)
    storage.write(block, 1, values)
    assert block.n_used == 4
    rows = storage.read(block)
    expected = mx.array(values).astype(DTYPES.get(format.name, mx.uint8))
    assert rows.dtype == expected.dtype
    assert rows.shape == (4, HEAD_DIM)
    assert mx.array_equal(rows[1:], expected)
    assert not mx.any(rows[0])
    storage.check_invariants()


AS: dict[str, Callable[[np.ndarray], Any]] = {
    "mlx": mx.array,
    "mlx_fp16": lambda values: mx.array(values).astype(mx.float16),
    "mlx_bf16": lambda values: mx.array(values).astype(mx.bfloat16),
    "mlx_int32": lambda values: mx.array(values).astype(mx.int32),
    "numpy": np.asarray,
    "numpy_fp64": lambda values: values.astype(np.float64),
    "numpy_columns": np.asfortranarray,
    "list": lambda values: values.tolist(),
}


@pytest.mark.parametrize("kind", AS)
@pytest.mark.parametrize("format", FORMATS)
def test_arrays_of_every_kind_are_taken(pool, storage, format, kind):
    values = np.arange(2 * HEAD_DIM, dtype=np.uint8).reshape(2, HEAD_DIM) % 2
    block = take(pool, format)
    storage.write(block, 0, AS[kind](values))
    assert np.array_equal(np.asarray(storage.read(block).astype(mx.float32)), values)


@pytest.mark.parametrize("format", FLOATS)
def test_floats_are_cast_as_mlx_casts_them(pool, storage, format):
    values = np.array([[0.1, -2049.0, 70000.0, 1e-8, 3.3895314e38, np.nan, np.inf, 0.0]])
    values = values.astype(np.float32)
    block = take(pool, format)
    storage.write(block, 0, values)
    expected = mx.array(values).astype(DTYPES[format]).astype(mx.float32)
    assert np.array_equal(
        np.asarray(storage.read(block).astype(mx.float32)), np.asarray(expected), equal_nan=True
    )


def test_codes_drop_a_fraction(pool, storage):
    block = take(pool, "int8")
    storage.write(block, 0, [[17.7] * HEAD_DIM])
    assert storage.read(block).tolist() == [[17] * HEAD_DIM]


def test_a_column_fills_its_rows(pool, storage):
    block = take(pool)
    storage.write(block, 0, mx.array([[1.0], [2.0]]))
    assert storage.read(block).tolist() == [[1.0] * HEAD_DIM, [2.0] * HEAD_DIM]


def test_no_rows_are_fine(pool, storage):
    block = take(pool)
    storage.write(block, BLOCK_SIZE, np.zeros((0, HEAD_DIM)))
    storage.write(block, 0, [])
    assert block.n_used == 0
    assert storage.read(block).shape == (0, HEAD_DIM)


def test_what_was_read_does_not_change(pool, storage):
    block = take(pool)
    storage.write(block, 0, mx.ones((1, HEAD_DIM)))
    before = storage.read(block)
    storage.write(block, 0, mx.zeros((1, HEAD_DIM)))
    assert mx.all(before)


def test_buffer_for_is_the_whole_block_and_makes_it(pool, storage):
    block = take(pool, "fp32")
    assert storage.resident_bytes() == 0
    buffer = storage.buffer_for(block)
    assert buffer.shape == (BLOCK_SIZE, HEAD_DIM) and buffer.dtype == mx.float32
    assert storage.resident_bytes() == BLOCK_SIZE * HEAD_DIM * 4
    assert "head_dim=8, resident_bytes=128" in repr(storage)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (np.zeros((1, 5)), ValueError, r"shape \(n, 8\) or \(n, 1\), got \(1, 5\)"),
        (np.zeros(HEAD_DIM), ValueError, r"got \(8,\)"),
        (np.zeros((1, 1, HEAD_DIM)), ValueError, r"got \(1, 1, 8\)"),
        (np.zeros((5, HEAD_DIM)), ValueError, "leave room for 5 rows in a block of 4"),
        ([[1.0], [1.0, 2.0]], ValueError, "rows of equal length"),
        (np.zeros((1, HEAD_DIM), complex), TypeError, "real numbers, got dtype complex128"),
        ([["a"] * HEAD_DIM], TypeError, "real numbers"),
        (None, TypeError, "real numbers"),
    ],
)
def test_values_of_another_shape_or_kind_are_refused(pool, storage, values, error, message):
    block = take(pool)
    with pytest.raises(error, match=message):
        storage.write(block, 0, values)
    assert block.n_used == 0 and storage.resident_bytes() == 0


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", np.longdouble, np.float16, np.uint64, bool])
def test_numbers_of_any_real_dtype_and_byte_order_are_taken(pool, storage, dtype):
    block = take(pool)
    storage.write(block, 0, np.ones((1, HEAD_DIM), dtype))
    assert storage.read(block).tolist() == [[1.0] * HEAD_DIM]


@pytest.mark.parametrize(
    ("offset", "error"),
    [(-1, ValueError), (4, ValueError), (2**70, ValueError), (1.0, TypeError), (True, TypeError)],
)
def test_offsets_out_of_range_are_refused(pool, storage, offset, error):
    with pytest.raises(error, match="offset must be"):
        storage.write(take(pool), offset, np.zeros((1, HEAD_DIM)))


def test_numpy_integers_are_offsets(pool, storage):
    block = take(pool)
    storage.write(block, np.int64(1), np.zeros((1, HEAD_DIM)))
    assert block.n_used == 2


def test_constructor_arguments_are_checked(pool):
    for head_dim in (0, -1):
        with pytest.raises(ValueError, match="head_dim must be >= 1"):
            MLXBlockStorage(pool, head_dim)
    for head_dim in (8.0, True, "8", None):
        with pytest.raises(TypeError, match="head_dim must be an int"):
            MLXBlockStorage(pool, head_dim)
    for head_dim in (2**20 + 1, 2**61, 2**70):  # of which 2**61 rows' bytes would overflow
        with pytest.raises(ValueError, match=f"head_dim must be <= 1048576, got {head_dim}"):
            MLXBlockStorage(pool, head_dim)
    with pytest.raises(TypeError, match="pool must be a BlockPoolAllocator, got str"):
        MLXBlockStorage("pool", 8)
    with pytest.raises(TypeError, match="pool must be a BlockPoolAllocator, got <Mock"):
        MLXBlockStorage(Mock(spec=BlockPoolAllocator), 8)
    with pytest.raises(TypeError, match="block"):
        MLXBlockStorage(pool, 8).read(3)


@pytest.mark.parametrize("format", ["FP16", "float16", "int5", "kivi"])
def test_a_tag_that_is_no_format_is_refused(pool, storage, format):
    with pytest.raises(ValueError, match=f"format '{format}' has no layout; those that have: fp32"):
        storage.buffer_for(take(pool, format))


def test_fault_F17_retired_blocks_give_their_bytes_back(pool, storage):
    for _ in range(3):  # growing and shrinking in turn leaks nothing
        blocks = [take(pool) for _ in range(pool.n_free("kv"))]
        for block in blocks:
            storage.write(block, 0, np.ones((1, HEAD_DIM)))
        assert storage.resident_bytes() == len(blocks) * BLOCK_SIZE * HEAD_DIM * 2
        pool.free(blocks)
        pool.shrink("kv", 2)
        assert storage.resident_bytes() == 2 * BLOCK_SIZE * HEAD_DIM * 2


def test_fault_F19_a_new_owner_reads_zeros(pool, storage):
    first = take(pool, owner=1)
    storage.write(first, 0, np.full((BLOCK_SIZE, HEAD_DIM), 7.0))
    pool.free([first])
    (second,) = pool.allocate("kv", BLOCK_SIZE, owner=2)
    assert second.block_id == first.block_id and second.n_used == BLOCK_SIZE
    assert not mx.any(storage.read(second))


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_fault_F20_blocks_take_the_bits_of_their_format(pool, storage, format):
    storage.write(take(pool, format.name), 0, np.zeros((1, HEAD_DIM)))
    assert storage.resident_bytes() == BLOCK_SIZE * HEAD_DIM * format.bits // 8


def test_row_bytes_are_those_of_a_width_that_can_be():
    entry = FORMATS["fp32"]
    assert (entry.row_bytes(0), entry.row_bytes(2**40)) == (0, 2**42)
    for width in (-1, 2**60, 2**70):
        with pytest.raises(ValueError, match=r"^\[Format::row_bytes\] width must"):
            entry.row_bytes(width)
    for width in (True, 1.5):
        with pytest.raises(TypeError, match=r"^\[Format::row_bytes\] width must be an int"):
            entry.row_bytes(width)


@pytest.mark.parametrize("head_dim", [1, 3, 5, 7, 9, 13])
@pytest.mark.parametrize("format", CODES)
def test_rows_are_padded_to_whole_bytes(pool, format, head_dim):
    storage = MLXBlockStorage(pool, head_dim)
    block = take(pool, format)
    values = np.full((BLOCK_SIZE, head_dim), FORMATS[format].max_code)
    storage.write(block, 0, values)
    assert storage.read(block).tolist() == values.tolist()
    assert storage.resident_bytes() == BLOCK_SIZE * FORMATS[format].row_bytes(head_dim)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.float32])
@pytest.mark.parametrize("format", CODES)
def test_fault_F20_codes_out_of_range_are_refused(pool, storage, format, dtype):
    block = take(pool, format)
    storage.write(block, 0, np.ones((1, HEAD_DIM), dtype))
    beyond = FORMATS[format].max_code + 1
    bad = [beyond, -1, np.nan, np.inf]
    for number in bad if dtype is np.float32 else bad[:2] if dtype is not np.uint8 else bad[:1]:
        if dtype is np.uint8 and beyond > 255:
            continue
        values = np.ones((2, HEAD_DIM), dtype)
        values[1, 3] = number
        with pytest.raises(ValueError, match=rf"codes in 0\.\.{beyond - 1}, got .* at \[1, 3\]"):
            storage.write(block, 0, values)
    assert storage.read(block).tolist() == [[1] * HEAD_DIM]


def test_fault_F22_another_representation_is_refused_while_the_block_holds_rows(pool, storage):
    block = take(pool, "int8")
    storage.write(block, 0, np.full((2, HEAD_DIM), 9))
    block.format = "int4"
    for use in (storage.read, storage.buffer_for, lambda b: storage.write(b, 0, [[1] * HEAD_DIM])):
        with pytest.raises(ValueError, match="must stay 'int8' while it holds rows, got 'int4'"):
            use(block)
    block.format = "int8"
    assert storage.read(block).tolist() == [[9] * HEAD_DIM] * 2
    block.n_used = 0
    block.format = "bf16"
    assert storage.buffer_for(block).dtype == mx.bfloat16
    assert not mx.any(storage.buffer_for(block))


def test_fault_F23_blocks_that_are_not_checked_out_are_refused(pool, storage):
    rows = np.ones((1, HEAD_DIM))
    block = take(pool)
    pool.free([block])
    other = BlockPoolAllocator(PoolConfig(block_size=BLOCK_SIZE, n_blocks=8))
    foreign = other.allocate("k", 1, owner=1)[0]
    for bad in (block, foreign, Block(block.block_id)):
        for use in (storage.read, storage.buffer_for, lambda b: storage.write(b, 0, rows)):
            with pytest.raises(ValueError, match="block"):
                use(bad)
    pool.shrink("kv", 0)
    with pytest.raises(ValueError, match="stale"):
        storage.write(block, 0, rows)
    assert storage.resident_bytes() == 0


def test_fault_F23_n_used_follows_writes_and_never_falls(pool, storage):
    block = take(pool)
    storage.write(block, 1, np.ones((2, HEAD_DIM)))
    assert block.n_used == 3
    storage.write(block, 0, np.ones((1, HEAD_DIM)))
    assert block.n_used == 3
    assert pool.stats.fragmentation() == 1 / 8


def test_field_G7_a_recycled_block_leaves_its_neighbours_alone(pool, storage):
    blocks = [take(pool) for _ in range(3)]
    for block in blocks:
        storage.write(block, 0, np.full((BLOCK_SIZE, HEAD_DIM), 5.0))
    pool.free([blocks[1]])
    again = take(pool)
    assert again.block_id == blocks[1].block_id
    assert not mx.any(storage.buffer_for(again))
    for block in (blocks[0], blocks[2]):
        assert mx.all(storage.buffer_for(block) == 5.0)


def test_field_G8_nan_left_behind_never_reaches_a_masked_sum(pool, storage):
    first = take(pool)
    storage.write(first, 0, np.full((BLOCK_SIZE, HEAD_DIM), np.nan))
    pool.free([first])
    second = take(pool)
    assert second.block_id == first.block_id
    storage.write(second, 0, np.ones((1, HEAD_DIM)))
    mask = mx.array([[1.0], [0.0], [0.0], [0.0]])
    assert mx.sum(mask * storage.buffer_for(second)).item() == HEAD_DIM


def test_field_G11_the_last_page_of_a_sequence_has_1_to_block_size_rows(pool):
    block_size = pool.config.block_size
    for n_tokens in (block_size, block_size + 1, 2 * block_size - 1):
        last = pool.allocate("kv", n_tokens, owner=9)[-1]
        assert last.n_used == (n_tokens - 1) % block_size + 1
        pool.free_all(9)
    with pytest.raises(ValueError):
        pool.allocate("kv", 0, owner=9)


def test_field_G12_a_block_used_again_has_its_new_formats_size(pool, storage):
    first = take(pool, "fp16")
    storage.write(first, 0, np.full((BLOCK_SIZE, HEAD_DIM), -1.0))
    pool.free([first])
    second = take(pool, "int4")
    assert second.block_id == first.block_id
    assert storage.buffer_for(second).tolist() == [[0] * HEAD_DIM] * BLOCK_SIZE
    assert storage.resident_bytes() == BLOCK_SIZE * HEAD_DIM // 2


def test_release_drops_the_bytes_and_may_be_repeated(pool, storage):
    block = take(pool)
    storage.write(block, 0, np.ones((1, HEAD_DIM)))
    storage.release(block)
    storage.release(block)
    assert storage.resident_bytes() == 0
    assert storage.idle_bytes() == BLOCK_SIZE * HEAD_DIM * 2
    assert storage.read(block).tolist() == [[0.0] * HEAD_DIM]
    storage.release(block)
    storage.drop_idle()
    assert storage.idle_bytes() == 0


def test_a_stale_release_spares_the_next_request(pool, storage):
    first = take(pool)
    storage.write(first, 0, np.ones((1, HEAD_DIM)))
    pool.free([first])
    second = take(pool, owner=2)
    storage.write(second, 0, np.full((1, HEAD_DIM), 2.0))
    storage.release(first)
    assert storage.read(second).tolist() == [[2.0] * HEAD_DIM]


def test_a_shared_block_is_copied_before_it_is_written(pool, storage):
    block = take(pool, owner=1)
    storage.write(block, 0, np.full((1, HEAD_DIM), 3.0))
    (shared,) = pool.fork(1, 2)
    with pytest.raises(ValueError, match="make it writable first"):
        storage.write(shared, 1, np.ones((1, HEAD_DIM)))
    copy = storage.writable(shared)
    assert copy.block_id != block.block_id and copy.owner == 2
    storage.write(copy, 1, np.full((1, HEAD_DIM), 4.0))
    assert storage.read(block).tolist() == [[3.0] * HEAD_DIM]
    assert storage.read(copy).tolist() == [[3.0] * HEAD_DIM, [4.0] * HEAD_DIM]
    assert storage.writable(copy) is copy
    storage.check_invariants()


def test_scrub_on_free_changes_nothing_that_can_be_read(pool):
    storage = MLXBlockStorage(pool, HEAD_DIM, scrub_on_free=True)
    for value in (1.0, 2.0):
        block = take(pool)
        assert not mx.any(storage.buffer_for(block))
        storage.write(block, 0, np.full((1, HEAD_DIM), value))
        assert storage.read(block).tolist() == [[value] * HEAD_DIM]
        pool.free([block])
        storage.check_invariants()


def test_formats_live_side_by_side_in_one_pool(pool, storage):
    blocks = {name: take(pool, name) for name in FORMATS}
    values = {
        name: numbers(entry, BLOCK_SIZE, i) for i, (name, entry) in enumerate(FORMATS.items())
    }
    for name, block in blocks.items():
        storage.write(block, 0, values[name])
    for name, block in blocks.items():
        expected = mx.array(values[name]).astype(DTYPES.get(name, mx.uint8))
        assert mx.array_equal(storage.read(block), expected), name


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), format=st.sampled_from(list(FORMATS)), head_dim=st.integers(1, 40))
def test_any_writes_read_back_like_an_array(data, format, head_dim):
    pool = BlockPoolAllocator(PoolConfig(block_size=5, n_blocks=2))
    storage = MLXBlockStorage(pool, head_dim)
    block = pool.allocate("k", 1, owner=1, format=format)[0]
    block.n_used = 0
    model = np.zeros((5, head_dim), np.int64)
    used = 0
    for _ in range(data.draw(st.integers(0, 5))):
        offset = data.draw(st.integers(0, 5))
        n = data.draw(st.integers(0, 5 - offset))
        top = 100 if FORMATS[format].is_float else FORMATS[format].max_code
        seed = data.draw(st.integers(0, 2**32 - 1))
        rows = np.random.default_rng(seed).integers(0, top + 1, (n, head_dim))
        storage.write(block, offset, rows)
        model[offset : offset + n] = rows
        used = max(used, offset + n) if n else used
    assert block.n_used == used
    assert np.array_equal(np.asarray(storage.read(block).astype(mx.int32)), model[:used])
    assert np.array_equal(np.asarray(storage.buffer_for(block).astype(mx.int32)), model)
    storage.check_invariants()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_of_fork_can_go_on_while_another_thread_was_writing(pool, storage):
    blocks = [take(pool) for _ in range(2)]
    rows = np.ones((BLOCK_SIZE, HEAD_DIM))
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            storage.write(blocks[0], 0, rows)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                try:
                    storage._native.write(blocks[1], 0, rows)
                    storage.check_invariants()
                    os._exit(0)
                except BaseException:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        done.set()
        writer.join()
