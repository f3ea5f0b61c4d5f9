"""PoolConfig: a checked dataclass that a pool fixes."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import asdict, replace

import pytest
from kvpool.memory import BlockPoolAllocator, PoolConfig


def test_published_arguments_in_order() -> None:
    assert str(inspect.signature(PoolConfig)).startswith(
        "(block_size: 'int' = 16, n_blocks: 'int' = 1024, separate_kv: 'bool' = True, "
        "grow_on_exhaustion: 'bool' = False, max_blocks: 'int | None' = None)"
    )
    assert PoolConfig(4, 8, False, True, 9) == PoolConfig(
        block_size=4, n_blocks=8, separate_kv=False, grow_on_exhaustion=True, max_blocks=9
    )


def test_is_a_plain_dataclass() -> None:
    config = PoolConfig(block_size=4)
    assert repr(config) == (
        "PoolConfig(block_size=4, n_blocks=1024, separate_kv=True, grow_on_exhaustion=False, "
        "max_blocks=None)"
    )
    assert asdict(config)["n_blocks"] == 1024
    with pytest.raises(TypeError, match="unhashable"):
        hash(config)
    config.block_size = 8
    assert config == PoolConfig(block_size=8)


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size", 0), ("block_size", -1), ("n_blocks", 0), ("max_blocks", 3), ("max_blocks", 0)],
)
def test_values_out_of_range(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^\[PoolConfig\] {field} must be >= .*, got {value}$"):
        PoolConfig(**{"n_blocks": 4, "grow_on_exhaustion": True, field: value})


def test_a_bound_on_growth_does_not_bind_a_pool_that_does_not_grow() -> None:
    assert BlockPoolAllocator(PoolConfig(n_blocks=4, max_blocks=3)).stats.n_blocks == 4


@pytest.mark.parametrize("field", ["block_size", "n_blocks", "max_blocks"])
@pytest.mark.parametrize("value", [2**63, 2**70])
def test_values_that_no_pool_can_have(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^\[PoolConfig\] {field} must be <= .*, got {value}$"):
        PoolConfig(**{field: value})
    if field != "max_blocks":
        with pytest.raises(ValueError, match=f"{field} must be <= 2147483647, got 2147483648"):
            PoolConfig(**{field: 2**31})


@pytest.mark.parametrize("field", ["block_size", "n_blocks", "max_blocks"])
@pytest.mark.parametrize("value", [1.5, 8.0, True, "8"])
def test_values_of_another_type(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"^\[PoolConfig\] {field} must be an int, got {value!r}$"):
        PoolConfig(**{field: value})


@pytest.mark.parametrize("field", ["separate_kv", "grow_on_exhaustion"])
def test_switches_are_bools(field: str) -> None:
    with pytest.raises(TypeError, match=rf"^\[PoolConfig\] {field} must be a bool, got 1$"):
        PoolConfig(**{field: 1})


def test_checked_again_when_a_pool_is_built() -> None:
    config = PoolConfig()
    config.n_blocks = 8.0
    with pytest.raises(TypeError, match=r"n_blocks must be an int, got 8\.0"):
        BlockPoolAllocator(config)
    config.n_blocks = 0
    with pytest.raises(ValueError, match="n_blocks must be >= 1, got 0"):
        BlockPoolAllocator(config)
    config.n_blocks = 8  # not fixed by what failed
    assert BlockPoolAllocator(config).n_free("k") == 4


def test_numbers_with_an_index_become_ints() -> None:
    class Four:
        def __index__(self) -> int:
            return 4

    config = PoolConfig(block_size=Four(), n_blocks=8)
    assert type(config.block_size) is int and config.block_size == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 32),
        ("n_blocks", 9),
        ("separate_kv", False),
        ("grow_on_exhaustion", True),
        ("max_blocks", 2048),
    ],
)
def test_fixed_once_a_pool_uses_it(field: str, value: object) -> None:
    config = PoolConfig()
    pool = BlockPoolAllocator(config)
    with pytest.raises(AttributeError, match=rf"^\[PoolConfig\] {field} cannot change once a pool"):
        setattr(config, field, value)
    assert pool.config is config and config == PoolConfig()
    changed = replace(config, **{field: value})
    assert getattr(changed, field) == value
    BlockPoolAllocator(config)  # another pool may share it


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
def test_a_copy_belongs_to_no_pool(duplicate: object) -> None:
    config = PoolConfig(block_size=4)
    BlockPoolAllocator(config)
    twin = duplicate(config)
    assert twin == config
    twin.block_size = 8
    assert (config.block_size, twin.block_size) == (4, 8)


def test_tokens_for_layers() -> None:
    assert PoolConfig(n_blocks=4096).tokens_for(28) == 1168
    assert PoolConfig(n_blocks=4096, separate_kv=False).tokens_for(28) == 1168
    assert PoolConfig(n_blocks=4096).tokens_for(28, n_sequences=2) == 576
    assert PoolConfig(n_blocks=4).tokens_for(28) == 0
    with pytest.raises(ValueError, match="n_layers must be >= 1, got 0"):
        PoolConfig().tokens_for(0)
