"""PoolBackedKVCache and build_pooled_caches: the pool in the decode path of mlx-lm's models."""

from kvpool.mlx_lm.caches import PoolBackedKVCache, build_pooled_caches

__all__ = ["PoolBackedKVCache", "build_pooled_caches"]
