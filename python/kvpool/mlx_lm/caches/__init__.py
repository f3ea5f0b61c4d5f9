"""Caches of a model's layers that a block pool keeps the books of.

Importing this package makes their class names known to ``mlx_lm.models.cache``, where mlx-lm's
``load_prompt_cache`` looks them up.
"""

from mlx_lm.models import cache as _mlx_lm_cache

from kvpool.mlx_lm.caches.batch_kv_cache import PoolBackedBatchKVCache
from kvpool.mlx_lm.caches.batch_rotating_kv_cache import PoolBackedBatchRotatingKVCache
from kvpool.mlx_lm.caches.build import attach_caches, build_pooled_caches, rewind_step
from kvpool.mlx_lm.caches.kv_cache import PoolBackedKVCache
from kvpool.mlx_lm.caches.quantized_kv_cache import PoolBackedQuantizedKVCache
from kvpool.mlx_lm.caches.rotating_kv_cache import PoolBackedRotatingKVCache

__all__ = [
    "PoolBackedBatchKVCache",
    "PoolBackedBatchRotatingKVCache",
    "PoolBackedKVCache",
    "PoolBackedQuantizedKVCache",
    "PoolBackedRotatingKVCache",
    "attach_caches",
    "build_pooled_caches",
    "rewind_step",
]

for _cls in (
    PoolBackedBatchKVCache,
    PoolBackedBatchRotatingKVCache,
    PoolBackedKVCache,
    PoolBackedQuantizedKVCache,
    PoolBackedRotatingKVCache,
):
    setattr(_mlx_lm_cache, _cls.__name__, _cls)
