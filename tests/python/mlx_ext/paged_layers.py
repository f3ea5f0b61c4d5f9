"""Small paged layers, and the dense arrays that they must show."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from kvpool import BlockPoolAllocator, PoolConfig
from kvpool._mlx_module import extension

HEADS, KEY_DIM, VALUE_DIM = 2, 16, 8


def make_pool(n_blocks: int = 256, block_size: int = 8, **config: Any) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=n_blocks, **config))


def make_group(pool: BlockPoolAllocator | None = None, owner: int = 1) -> Any:
    return extension.PagedGroup(make_pool() if pool is None else pool, owner)


def make_layer(
    group: Any = None,
    *,
    heads: int = HEADS,
    key_dim: int = KEY_DIM,
    value_dim: int = VALUE_DIM,
    format: str = "fp32",
    tiers: list[tuple[str, int]] | None = None,
    window: int = 0,
) -> Any:
    stream = extension.StreamFormat(format, tiers or [])
    return extension.PagedLayer(
        make_group() if group is None else group,
        heads,
        key_dim,
        value_dim,
        keys=stream,
        values=stream,
        window=window,
    )


class Tokens:
    """Keys and values of a sequence, made up as it grows, and what a dense cache would hold."""

    def __init__(
        self,
        seed: int = 0,
        *,
        heads: int = HEADS,
        key_dim: int = KEY_DIM,
        value_dim: int = VALUE_DIM,
        dtype: mx.Dtype = mx.float32,
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.heads, self.dims, self.dtype = heads, (key_dim, value_dim), dtype
        self.keys, self.values = (self._rows(0, dim) for dim in self.dims)

    def _rows(self, n: int, dim: int) -> mx.array:
        return mx.array(
            self.random.standard_normal((1, self.heads, n, dim), dtype=np.float32)
        ).astype(self.dtype)

    def next(self, n: int) -> tuple[mx.array, mx.array]:
        """`n` more tokens."""
        keys, values = (self._rows(n, dim) for dim in self.dims)
        self.keys = mx.concatenate([self.keys, keys], axis=2)
        self.values = mx.concatenate([self.values, values], axis=2)
        mx.eval(keys, values, self.keys, self.values)
        return keys, values

    def trim(self, n: int) -> None:
        self.keys, self.values = (x[:, :, : x.shape[2] - n] for x in (self.keys, self.values))
        mx.eval(self.keys, self.values)

    def copy(self, seed: int) -> Tokens:
        twin = Tokens.__new__(Tokens)
        twin.__dict__.update(self.__dict__)
        twin.random = np.random.default_rng(seed)
        return twin


def same(a: mx.array, b: mx.array) -> bool:
    """Equal to the bit, shape and dtype included."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(mx.array_equal(a, b))


def shows(fetched: tuple[mx.array, mx.array] | None, tokens: Tokens) -> bool:
    """What a layer returned is what a dense cache would hold."""
    assert fetched is not None
    return same(fetched[0], tokens.keys) and same(fetched[1], tokens.values)
