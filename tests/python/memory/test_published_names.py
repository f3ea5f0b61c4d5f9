"""The one-word move: every public name of the published memory package, with its arguments."""

from __future__ import annotations

import importlib
import inspect

import kvpool
import pytest
from kvpool.core import exceptions

# Class or function to the parameters of its constructor and of its calls, defaults included.
PUBLISHED = {
    "AllocationStats": {
        "__init__": "n_blocks n_allocations=0 n_frees=0 n_reused=0 n_exhausted=0 n_grown=0 "
        "n_retired=0 peak_blocks_in_use=0 _fragmented_count=0",
        "blocks_in_use": "",
        "fragmentation": "",
        "snapshot": "",
        "to_prometheus": "prefix='veloxquant_block_pool'",
    },
    "Block": {
        "__init__": "block_id stream='kv' format='fp16' n_used=0 owner=None ever_allocated=False"
    },
    "BlockPoolAllocator": {
        "__init__": "config=None",
        "register_owner": "owner",
        "release_owner": "owner",
        "allocate": "stream n_tokens owner format='fp16'",
        "free": "blocks",
        "free_all": "owner",
        "blocks_for": "owner",
        "n_free": "stream='k'",
        "shrink": "stream target_free",
        "mark_used": "block n_used",
    },
    "PoolConfig": {
        "__init__": "block_size=16 n_blocks=1024 separate_kv=True grow_on_exhaustion=False "
        "max_blocks=None"
    },
    "MLXBlockStorage": {
        "__init__": "pool head_dim",
        "buffer_for": "block",
        "write": "block offset values",
        "read": "block",
        "resident_bytes": "",
        "release": "block",
    },
    "PooledKVCache": {
        "__init__": "inner pool owner=-1 format='fp16'",
        "append_key": "k",
        "append_value": "v",
        "append": "k v",
        "attend": "q",
        "memory_bytes": "",
        "release": "",
        "n_blocks_held": "",
        "reset": "",
    },
    "PoolBackedKVCache": {
        "__init__": "pool owner=-1 step=None",
        "update_and_fetch": "keys values",
        "release": "",
        "size": "",
        "is_trimmable": "",
        "trim": "n",
        "empty": "",
    },
    "build_pooled_caches": {"__call__": "model pool owner step=None"},
}
SUBMODULES = {
    "AllocationStats": "block_pool",
    "Block": "block_pool",
    "BlockPoolAllocator": "block_pool",
    "PoolConfig": "block_pool",
    "MLXBlockStorage": "mlx_storage",
    "PooledKVCache": "pooled_cache",
    "PoolBackedKVCache": "pool_backed_cache",
    "build_pooled_caches": "pool_backed_cache",
}
ATTRIBUTES = {
    "AllocationStats": ["n_blocks", "n_allocations", "n_frees", "n_reused", "n_exhausted"],
    "BlockPoolAllocator": ["config", "stats", "history"],
    "PoolConfig": ["block_size", "n_blocks", "separate_kv", "grow_on_exhaustion", "max_blocks"],
    "Block": ["block_id", "stream", "format", "n_used", "owner", "ever_allocated"],
}
EXCEPTIONS = {
    "BlockPoolExhaustedError": RuntimeError,
    "OwnerAlreadyActiveError": ValueError,
    "QuantizerConfigError": ValueError,
    "ArtifactNotFoundError": FileNotFoundError,
    "CyclicPipelineError": RuntimeError,
    "CodebookDimensionMismatch": ValueError,
}


def parameters(call: object) -> list[str]:
    return [
        name if parameter.default is parameter.empty else f"{name}={parameter.default!r}"
        for name, parameter in inspect.signature(call).parameters.items()
        if name != "self"
    ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_arguments_come_first_and_unchanged(name: str) -> None:
    published = getattr(importlib.import_module("kvpool.memory"), name)
    submodule = importlib.import_module(f"kvpool.memory.{SUBMODULES[name]}")
    assert getattr(submodule, name) is published
    for call, expected in PUBLISHED[name].items():
        whole = call in ("__init__", "__call__")
        ours = parameters(published if whole else getattr(published, call))
        assert ours[: len(expected.split())] == expected.split(), call
        assert all("=" in added for added in ours[len(expected.split()) :]), call


def test_published_attributes() -> None:
    from kvpool.memory import AllocationStats, Block, BlockPoolAllocator, PoolConfig

    made = [AllocationStats(1), Block(1), BlockPoolAllocator(), PoolConfig()]
    for value in made:
        for attribute in ATTRIBUTES[type(value).__name__]:
            assert hasattr(value, attribute)


def test_all_of_the_memory_package() -> None:
    import kvpool.memory

    exported = {"BlockPoolExhaustedError", "OwnerAlreadyActiveError"}
    assert set(kvpool.memory.__all__) == {*PUBLISHED, *exported} - {"MLXBlockStorage"}
    assert "MLXBlockStorage" in dir(kvpool.memory)
    names: dict[str, object] = {}
    exec("from kvpool.memory import *", names)
    assert set(kvpool.memory.__all__) <= set(names)


@pytest.mark.parametrize("module", ["kvpool", "kvpool.memory"])
def test_unknown_attribute(module: str) -> None:
    with pytest.raises(AttributeError, match=f"^module '{module}' has no attribute 'nope'$"):
        importlib.import_module(module).nope  # noqa: B018


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exceptions_and_their_bases(name: str) -> None:
    error = getattr(exceptions, name)
    assert error.__bases__ == (EXCEPTIONS[name],)
    assert getattr(importlib.import_module("kvpool.core"), name) is error
    assert getattr(kvpool, name) is error


def test_top_level_names() -> None:
    from kvpool.memory import block_pool

    assert kvpool.BlockPoolAllocator is block_pool.BlockPoolAllocator
    assert kvpool.PoolConfig is block_pool.PoolConfig
    assert {"PooledKVCache", "PoolBackedKVCache", "build_pooled_caches"} <= set(kvpool.__all__)
    assert {"save_prompt_cache", "load_prompt_cache"} <= set(kvpool.__all__)
    assert {*kvpool.__all__} <= {*dir(kvpool)}
