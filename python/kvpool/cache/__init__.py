"""KV caches that attend by themselves, exact and quantised.

``KVCacheBuilder`` and ``KVCacheFactory`` make caches that keep keys and values as packed codes, by
one of the methods in ``METHODS``; ``ExactKVCache`` keeps what it is given. Each takes a key and a
value at a time and answers queries; the quantised ones also take many heads and sequences. Any of
them goes into a ``kvpool.memory.PooledKVCache``, which charges its tokens to a pool.
"""

from kvpool.cache.base import KVCache
from kvpool.cache.builder import KVCacheBuilder
from kvpool.cache.config import KVCacheConfig
from kvpool.cache.exact import ExactKVCache
from kvpool.cache.factory import KVCacheFactory
from kvpool.cache.methods import METHODS, STANDALONE_METHODS, Method, MethodInfo
from kvpool.cache.quantized import QuantizedKVCache, spectral_calibration

__all__ = [
    "METHODS",
    "STANDALONE_METHODS",
    "ExactKVCache",
    "KVCache",
    "KVCacheBuilder",
    "KVCacheConfig",
    "KVCacheFactory",
    "Method",
    "MethodInfo",
    "QuantizedKVCache",
    "spectral_calibration",
]
