"""KV caches of one head and one sequence: append a key and a value, attend with a query.

``ExactKVCache`` keeps what it is given and attends exactly. Any cache of this kind goes into a
``kvpool.memory.PooledKVCache``, which charges its tokens to a pool.
"""

from kvpool.cache.base import KVCache
from kvpool.cache.exact import ExactKVCache

__all__ = ["ExactKVCache", "KVCache"]
