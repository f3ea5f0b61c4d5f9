"""Paged caches: tokens lie in pool blocks, and attention reads them there."""

from kvpool.mlx_lm.paged._counts import AttentionStats, attention_stats, reset_attention_stats
from kvpool.mlx_lm.paged.age_policy import AgePolicy
from kvpool.mlx_lm.paged.hook import (
    attention,
    install_attention,
    is_attention_installed,
    uninstall_attention,
)

__all__ = [
    "AgePolicy",
    "AttentionStats",
    "attention",
    "attention_stats",
    "install_attention",
    "is_attention_installed",
    "reset_attention_stats",
    "uninstall_attention",
]
