"""A block pool behind mlx-lm: in scripts, in batches and in its server."""

from kvpool.mlx_lm.pooling import PooledModel, pool_model

__all__ = ["PooledModel", "pool_model"]
