"""How many calls of attention were answered by whom."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["AttentionStats", "attention_stats", "reset_attention_stats", "uncounted"]

_counting: ContextVar[bool] = ContextVar("_counting", default=True)


@contextmanager
def uncounted() -> Iterator[None]:
    """Leaves out the calls of this block: those of a model that is only asked for its shapes."""
    token = _counting.set(False)
    try:
        yield
    finally:
        _counting.reset(token)


@dataclass(frozen=True)
class AttentionStats:
    """Calls of mlx-lm's attention while the hook was in place, in all threads.

    Attributes:
        kernel: Answered by kvpool's kernels.
        fell_back: Over paged caches, but answered by mlx-lm: the number of calls by the reason.
        not_ours: Over other keys and values; mlx-lm answered.
    """

    kernel: int = 0
    fell_back: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    not_ours: int = 0

    @property
    def total(self) -> int:
        """All calls."""
        return self.kernel + sum(self.fell_back.values()) + self.not_ours

    def since(self, before: AttentionStats) -> AttentionStats:
        """What was counted after ``before`` was taken."""
        fell_back = Counter(self.fell_back)
        fell_back.subtract(before.fell_back)
        return AttentionStats(
            self.kernel - before.kernel,
            MappingProxyType({reason: n for reason, n in fell_back.items() if n}),
            self.not_ours - before.not_ours,
        )

    def __str__(self) -> str:
        parts = [f"{self.kernel:,} by the kernels"]
        parts += [f"{n:,} by mlx-lm ({reason})" for reason, n in sorted(self.fell_back.items())]
        if self.not_ours:
            parts.append(f"{self.not_ours:,} over other caches")
        return ", ".join(parts)


class _Counts:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kernel = self.not_ours = 0
        self.fell_back: Counter[str] = Counter()


_counts = _Counts()


def attention_stats() -> AttentionStats:
    """How mlx-lm's attention was answered since the process began or the last reset."""
    with _counts.lock:
        fell_back = MappingProxyType(dict(_counts.fell_back))
        return AttentionStats(_counts.kernel, fell_back, _counts.not_ours)


def reset_attention_stats() -> None:
    """Starts counting at zero."""
    with _counts.lock:
        _counts.kernel = _counts.not_ours = 0
        _counts.fell_back.clear()


def count_kernel() -> None:
    with _counts.lock:
        _counts.kernel += 1


def count_fallback(reason: str) -> None:
    with _counts.lock:
        _counts.fell_back[reason] += 1


def count_not_ours() -> None:
    if not _counting.get():
        return
    with _counts.lock:
        _counts.not_ours += 1


def _renew_lock() -> None:
    _counts.lock = threading.Lock()  # another thread may have held it when the process forked


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
