"""The interface of a KV cache of one head and one sequence."""

from __future__ import annotations

import abc
from typing import Any

from kvpool.cache.methods import STANDALONE_METHODS

__all__ = ["STANDALONE_METHODS", "KVCache"]


class KVCache(abc.ABC):
    """Keys and values of one attention head, a token at a time.

    A token is a key and then its value, each of shape ``(head_dim,)``. ``len()`` is the number of
    tokens the cache holds now: one that forgets its oldest tokens does not count them.

    A cache may offer ``discard_key()``, which forgets a key whose value has not come: it lets
    ``PooledKVCache.append`` take a pair back whose value was refused.
    """

    @abc.abstractmethod
    def append_key(self, k: Any) -> None:
        """Takes the key of the next token, shape ``(head_dim,)``."""

    @abc.abstractmethod
    def append_value(self, v: Any) -> None:
        """Takes the value that belongs to the last key, shape ``(head_dim,)``."""

    def append(self, k: Any, v: Any) -> None:
        """Takes a token: its key and its value."""
        self.append_key(k)
        self.append_value(v)

    @abc.abstractmethod
    def attend(self, q: Any) -> Any:
        """Attention of the query ``q``, shape ``(head_dim,)``, over the tokens; same shape."""

    @abc.abstractmethod
    def memory_bytes(self) -> int:
        """Bytes that the cache's data take."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Forgets every token."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Tokens held now."""
