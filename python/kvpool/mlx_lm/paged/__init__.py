"""Paged caches: tokens lie in pool blocks, and attention reads them there.

The hook needs MLX and mlx-lm alone; the caches bring the extension module ``kvpool._mlx`` with them
when they are first asked for.
"""

from typing import TYPE_CHECKING

from kvpool._lazy import lazy_attributes
from kvpool.mlx_lm.paged._counts import AttentionStats, attention_stats, reset_attention_stats
from kvpool.mlx_lm.paged.age_policy import AgePolicy
from kvpool.mlx_lm.paged.hook import (
    BYPASSING_MODELS,
    attention,
    install_attention,
    is_attention_installed,
    uninstall_attention,
)

if TYPE_CHECKING:
    from kvpool.mlx_lm.paged.batch_kv_cache import PagedBatchKVCache
    from kvpool.mlx_lm.paged.build import build_paged_caches
    from kvpool.mlx_lm.paged.kv_cache import PagedKVCache

__all__ = [
    "BYPASSING_MODELS",
    "AgePolicy",
    "AttentionStats",
    "PagedBatchKVCache",
    "PagedKVCache",
    "attention",
    "attention_stats",
    "build_paged_caches",
    "install_attention",
    "is_attention_installed",
    "reset_attention_stats",
    "uninstall_attention",
]

_LAZY = {
    "PagedBatchKVCache": "kvpool.mlx_lm.paged.batch_kv_cache",
    "PagedKVCache": "kvpool.mlx_lm.paged.kv_cache",
    "build_paged_caches": "kvpool.mlx_lm.paged.build",
}
__getattr__ = lazy_attributes(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
