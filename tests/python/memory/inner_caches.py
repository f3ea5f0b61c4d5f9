"""Caches to wrap: the smallest objects with the methods that PooledKVCache asks for."""

from __future__ import annotations

from typing import Any


class ListCache:
    """Keeps keys and values in lists; ``window`` is the most tokens it keeps."""

    def __init__(self, window: int | None = None) -> None:
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self.window = window
        self.refuse_keys = False
        self.refuse_values = False

    def append_key(self, k: Any) -> None:
        if self.refuse_keys:
            raise RuntimeError("key refused")
        self.keys.append(k)

    def append_value(self, v: Any) -> None:
        if self.refuse_values:
            raise RuntimeError("value refused")
        self.values.append(v)
        if self.window is not None and len(self.values) > self.window:
            del self.keys[0], self.values[0]

    def attend(self, q: Any) -> Any:
        return (q, len(self.values))

    def memory_bytes(self) -> int:
        return 100 * len(self.values)

    def reset(self) -> None:
        self.keys.clear()
        self.values.clear()

    def __len__(self) -> int:
        return len(self.values)
