"""A block pool behind mlx-lm: in scripts, in batches and in its server."""

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

__all__ = [
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
