"""Where pages lie, and the way of a device that has no kernels: gathers and MLX's attention."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from kvpool._mlx_module import extension
from paged_layers import Tokens, make_group, make_layer, make_pool, shows


def test_the_default_follows_the_default_device() -> None:
    with mx.stream(mx.cpu):
        before = mx.default_device()
        mx.set_default_device(mx.cpu)
        try:
            assert extension.default_backend() == "cpu"
        finally:
            mx.set_default_device(before)


def test_a_pool_has_one_backend() -> None:
    pool = make_pool()
    assert extension.PagedPool.of(pool, backend="gather").backend == "gather"
    assert extension.PagedPool.of(pool).backend == "gather"
    with pytest.raises(ValueError, match=r"\[PagedPool::of\] backend is gather .* got cpu"):
        extension.PagedPool.of(pool, backend="cpu")
    with pytest.raises(ValueError, match="backend must be cpu, cuda or gather, got metal"):
        extension.PagedPool.of(make_pool(), backend="metal")


@pytest.mark.skipif(extension.default_backend() == "cuda", reason="there is a CUDA device")
def test_a_backend_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="backend cuda is not to be had: "):
        extension.PagedPool.of(make_pool(), backend="cuda")


def test_without_kernels_keys_and_values_are_gathered() -> None:
    pool = make_pool()
    extension.PagedPool.of(pool, backend="gather")
    layer, tokens = make_layer(make_group(pool)), Tokens()
    for n in (13, 1, 7):
        keys, values = layer.update_and_fetch(*tokens.next(n))
        queries = mx.array(np.random.default_rng(n).standard_normal((1, 4, 1, 16)), mx.float32)
        reason = extension.attend(queries, keys, values, 0.25)
        assert reason == "no kernels that read pages on this device"
        assert shows((keys, values), tokens)
    twin = layer.fork(make_group(pool, 2))
    layer.trim(5)
    tokens_of_twin = tokens.copy(3)
    tokens.trim(5)
    assert shows(layer.update_and_fetch(*tokens.next(9)), tokens)
    assert shows(twin.update_and_fetch(*tokens_of_twin.next(2)), tokens_of_twin)
    pool.check_invariants()
