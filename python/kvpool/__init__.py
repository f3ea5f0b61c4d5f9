"""kvpool: a KV-cache block pool for language-model inference.

``import kvpool`` loads the allocator and nothing of MLX; the caches of a model bring MLX with them
when they are first asked for.
"""

from typing import TYPE_CHECKING

from kvpool._lazy import lazy_attributes
from kvpool._native import __version__
from kvpool.core.exceptions import (
    ArtifactNotFoundError,
    AttentionHookError,
    BlockPoolExhaustedError,
    CodebookDimensionMismatch,
    CyclicPipelineError,
    OwnerAlreadyActiveError,
    PromptCacheError,
    QuantizerConfigError,
    RequestTooLargeError,
)
from kvpool.memory.block_pool import AllocationStats, Block, BlockPoolAllocator, PoolConfig

if TYPE_CHECKING:
    from kvpool.cache import (
        STANDALONE_METHODS,
        ExactKVCache,
        KVCache,
        KVCacheBuilder,
        KVCacheConfig,
        KVCacheFactory,
    )
    from kvpool.memory.pool_backed_cache import PoolBackedKVCache, build_pooled_caches
    from kvpool.memory.pooled_cache import PooledKVCache
    from kvpool.mlx_lm.paged import (
        AgePolicy,
        AttentionStats,
        PagedKVCache,
        attention,
        attention_stats,
        build_paged_caches,
        install_attention,
        is_attention_installed,
        reset_attention_stats,
        uninstall_attention,
    )
    from kvpool.prompt_cache import load_prompt_cache, save_prompt_cache

__all__ = [
    "STANDALONE_METHODS",
    "AgePolicy",
    "AllocationStats",
    "ArtifactNotFoundError",
    "AttentionHookError",
    "AttentionStats",
    "Block",
    "BlockPoolAllocator",
    "BlockPoolExhaustedError",
    "CodebookDimensionMismatch",
    "CyclicPipelineError",
    "ExactKVCache",
    "KVCache",
    "KVCacheBuilder",
    "KVCacheConfig",
    "KVCacheFactory",
    "OwnerAlreadyActiveError",
    "PagedKVCache",
    "PoolBackedKVCache",
    "PoolConfig",
    "PooledKVCache",
    "PromptCacheError",
    "QuantizerConfigError",
    "RequestTooLargeError",
    "__version__",
    "attention",
    "attention_stats",
    "build_paged_caches",
    "build_pooled_caches",
    "install_attention",
    "is_attention_installed",
    "load_prompt_cache",
    "reset_attention_stats",
    "save_prompt_cache",
    "uninstall_attention",
]

_LAZY = {
    "AgePolicy": "kvpool.mlx_lm.paged",
    "AttentionStats": "kvpool.mlx_lm.paged",
    "attention": "kvpool.mlx_lm.paged",
    "attention_stats": "kvpool.mlx_lm.paged",
    "PagedKVCache": "kvpool.mlx_lm.paged",
    "build_paged_caches": "kvpool.mlx_lm.paged",
    "install_attention": "kvpool.mlx_lm.paged",
    "is_attention_installed": "kvpool.mlx_lm.paged",
    "reset_attention_stats": "kvpool.mlx_lm.paged",
    "uninstall_attention": "kvpool.mlx_lm.paged",
    "ExactKVCache": "kvpool.cache",
    "STANDALONE_METHODS": "kvpool.cache",
    "KVCache": "kvpool.cache",
    "KVCacheBuilder": "kvpool.cache",
    "KVCacheConfig": "kvpool.cache",
    "KVCacheFactory": "kvpool.cache",
    "PoolBackedKVCache": "kvpool.memory.pool_backed_cache",
    "PooledKVCache": "kvpool.memory.pooled_cache",
    "build_pooled_caches": "kvpool.memory.pool_backed_cache",
    "load_prompt_cache": "kvpool.prompt_cache",
    "save_prompt_cache": "kvpool.prompt_cache",
}
__getattr__ = lazy_attributes(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
