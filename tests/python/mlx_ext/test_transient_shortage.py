"""Memory that only work on its way still holds is waited for."""

from __future__ import annotations

import mlx.core as mx
import pytest
from kvpool._mlx_module import extension
from kvpool.core.exceptions import BlockPoolExhaustedError
from paged_layers import make_group, make_layer, make_pool

# Of 16 tokens of two heads of 64 numbers.
FP16, INT8 = 16 * 2 * 64 * 2, 16 * 2 * (64 + 4)


def rows() -> mx.array:
    return mx.random.normal((1, 2, 16, 64)).astype(mx.float16)


def slowly(x: mx.array) -> mx.array:
    """The same numbers, later."""
    slow = mx.random.normal((400, 400))
    for _ in range(20):
        slow = mx.tanh(slow @ slow)
    return x + 0 * slow[0, 0].astype(x.dtype)


def test_bytes_that_a_demotion_on_its_way_holds_are_waited_for() -> None:
    pool = make_pool(64, 16)
    extension.PagedPool.of(pool, byte_budget=4 * FP16 + 2 * INT8)
    layer = make_layer(
        make_group(pool), key_dim=64, value_dim=64, format="fp16", tiers=[("int8", 0)]
    )
    layer.update_and_fetch(rows(), rows())
    mx.eval(layer.order)
    layer.update_and_fetch(slowly(rows()), rows())  # the block before it is demoted
    mx.async_eval(layer.order)
    layer.update_and_fetch(rows(), rows())  # fits once that has run
    with pytest.raises(BlockPoolExhaustedError):
        layer.update_and_fetch(rows(), rows())
    mx.eval(layer.order)
    assert layer.offset == 48
    pool.check_invariants()
