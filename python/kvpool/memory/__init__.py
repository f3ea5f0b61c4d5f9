"""The block pool and the caches that draw on it.

``BlockPoolAllocator`` with ``PoolConfig``, ``Block`` and ``AllocationStats`` keep the books in C++
and need no MLX. The caches and ``MLXBlockStorage`` hold MLX arrays: MLX is imported when one of
them is first asked for.

    from kvpool.memory import BlockPoolAllocator, PoolConfig

    pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=512))
    blocks = pool.allocate("k", n_tokens=40, owner=1)
    pool.free_all(owner=1)
"""

from typing import TYPE_CHECKING

from kvpool._lazy import lazy_attributes
from kvpool.core.exceptions import BlockPoolExhaustedError, OwnerAlreadyActiveError
from kvpool.memory.block_pool import AllocationStats, Block, BlockPoolAllocator, PoolConfig

if TYPE_CHECKING:
    from kvpool.memory.mlx_storage import MLXBlockStorage as MLXBlockStorage
    from kvpool.memory.pool_backed_cache import PoolBackedKVCache, build_pooled_caches
    from kvpool.memory.pooled_cache import PooledKVCache

__all__ = [
    "AllocationStats",
    "Block",
    "BlockPoolAllocator",
    "BlockPoolExhaustedError",
    "OwnerAlreadyActiveError",
    "PoolBackedKVCache",
    "PoolConfig",
    "PooledKVCache",
    "build_pooled_caches",
]

_LAZY = {
    "MLXBlockStorage": "kvpool.memory.mlx_storage",
    "PoolBackedKVCache": "kvpool.memory.pool_backed_cache",
    "PooledKVCache": "kvpool.memory.pooled_cache",
    "build_pooled_caches": "kvpool.memory.pool_backed_cache",
}
__getattr__ = lazy_attributes(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
