"""A block pool behind mlx-lm: in scripts, in batches and in its server."""

from typing import TYPE_CHECKING

from kvpool._lazy import lazy_attributes
from kvpool.mlx_lm.caches import (
    PoolBackedBatchKVCache,
    PoolBackedBatchRotatingKVCache,
    PoolBackedKVCache,
    PoolBackedQuantizedKVCache,
    PoolBackedRotatingKVCache,
    attach_caches,
    build_pooled_caches,
    rewind_step,
)
from kvpool.mlx_lm.pooling import PooledModel, pool_model

if TYPE_CHECKING:
    from kvpool.mlx_lm.admission import PagedBatchGenerator

__all__ = [
    "PagedBatchGenerator",
    "PoolBackedBatchKVCache",
    "PoolBackedBatchRotatingKVCache",
    "PoolBackedKVCache",
    "PoolBackedQuantizedKVCache",
    "PoolBackedRotatingKVCache",
    "PooledModel",
    "attach_caches",
    "build_pooled_caches",
    "pool_model",
    "rewind_step",
]

_LAZY = {"PagedBatchGenerator": "kvpool.mlx_lm.admission"}  # brings all of mlx_lm.generate
__getattr__ = lazy_attributes(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
