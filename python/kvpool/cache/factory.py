"""KVCacheFactory: a cache from a config."""

from __future__ import annotations

from kvpool.cache.base import KVCache
from kvpool.cache.config import KVCacheConfig
from kvpool.cache.quantized import QuantizedKVCache

__all__ = ["KVCacheFactory"]


class KVCacheFactory:
    """Makes caches from configs."""

    @staticmethod
    def create(config: KVCacheConfig) -> KVCache:
        """A new, empty cache.

        Raises:
            QuantizerConfigError: The config cannot work; the message names the field, its limits
                and its value.
        """
        return QuantizedKVCache(config)
