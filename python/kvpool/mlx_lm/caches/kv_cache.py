"""PoolBackedKVCache: mlx-lm's plain KV cache, its growth charged to a block pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpool.memory.block_pool import BlockPoolAllocator
from kvpool.mlx_lm.caches._arguments import checked_buffers
from kvpool.mlx_lm.caches._dense import DenseLayerCache
from kvpool.mlx_lm.caches._group import CacheGroup
from kvpool.mlx_lm.caches.quantized_kv_cache import PoolBackedQuantizedKVCache, warn_of_cuda

if TYPE_CHECKING:
    from kvpool.mlx_lm.caches.batch_kv_cache import PoolBackedBatchKVCache


class PoolBackedKVCache(DenseLayerCache):
    """A drop-in replacement for ``mlx_lm.models.cache.KVCache`` that a pool keeps the books of.

    Keys and values lie in contiguous buffers, as attention over MLX ops needs them. The pool is
    charged for exactly what the buffers hold: ``batch * ceil(rows / block_size)`` blocks of keys
    and as many of values, with ``n_used`` of each block following the tokens. A cache that is
    collected gives its blocks back; ``release`` does it sooner.

    Caches made by ``build_pooled_caches`` are a group: see there.

    Args:
        pool: The pool to draw on.
        owner: Whom the blocks belong to. A cache frees its own blocks only, so caches may share an
            owner.
        step: Rows to grow by, exactly. By default buffers grow by half again, rounded up to
            ``max(block_size, 256)`` rows, so that copies stay few, and by less where the pool is
            short, down to single blocks.

    Raises:
        TypeError: An argument is of another type.
        ValueError: ``step`` is below 1, or ``owner`` does not fit 64 bits.
    """

    def __init__(self, pool: BlockPoolAllocator, owner: int = -1, step: int | None = None) -> None:
        self._start(pool, owner, step)

    @classmethod
    def _member(cls, group: CacheGroup, step: int | None) -> PoolBackedKVCache:
        cache = cls.__new__(cls)
        cache._step = step
        cache._clear()
        cache._join(group)
        return cache

    @property
    def state(self) -> tuple[Any, Any, int]:
        """``(keys, values, offset)``, cut to the offset; ``(None, None, 0)`` while empty.

        The setter takes two or three of them and charges the pool for the new buffers.
        """
        return *self.keys_and_values(), self._lease.offset

    @state.setter
    def state(self, state: Any) -> None:
        where = self._where("state")
        keys, values, *offset = self._parts_of(state, least=2)
        if keys is not None or values is not None:
            checked_buffers(where, keys, values)
        self._place(keys, values, offset[0] if offset else None, where)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> PoolBackedBatchKVCache:
        """A batch of these caches' sequences, charged to the pool that they share.

        mlx-lm calls it a layer at a time: the batches of all layers are one group, whose owner is
        new. mlx-lm's own caches may be among ``caches``, behind the first.

        Raises:
            BlockPoolExhaustedError: The pool has too few blocks for the batch in all layers.
            TypeError: A cache is of another kind.
            ValueError: The caches are over different pools, or differ in heads or dims.
        """
        from kvpool.mlx_lm.caches.batch_kv_cache import PoolBackedBatchKVCache

        return PoolBackedBatchKVCache._merged(PoolBackedKVCache, caches)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> PoolBackedQuantizedKVCache:
        """A quantised cache with the same tokens that takes this one's place in its group.

        It is charged on its own, for as many blocks; this cache keeps its own until it is dropped.
        Where the pool is too full for both, the blocks pass on and this cache is empty.

        Warns on MLX's CUDA backend, whose quantised attention of mlx-lm is wrong for grouped
        queries in MLX 0.32.4.

        Args:
            group_size: Numbers that share a scale: 32, 64 or 128.
            bits: Width of a code: 2, 3, 4, 5, 6 or 8.

        Raises:
            TypeError: An argument is no int.
            ValueError: An argument is none of MLX's, or heads are not made of whole groups.
        """
        warn_of_cuda()
        self._settle()
        return PoolBackedQuantizedKVCache._of(self, group_size, bits)
