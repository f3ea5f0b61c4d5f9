"""Appends write in place, so functions that MLX traces cannot contain them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from kvpool._mlx_module import extension
from paged_layers import Tokens, make_layer, shows

REFUSED = r"^\[PagedLayer::update_and_fetch\] a paged cache cannot be used inside mx\.compile"


@pytest.mark.parametrize(
    "transform",
    [
        mx.compile,
        mx.grad,
        mx.value_and_grad,
        lambda f: lambda x: mx.vjp(f, [x], [mx.array(1.0)]),
        lambda f: lambda x: mx.jvp(f, [x], [x]),
        lambda f: lambda x: mx.vmap(f)(x[None]),
    ],
    ids=["compile", "grad", "value_and_grad", "vjp", "jvp", "vmap"],
)
def test_transformations_are_refused_and_change_nothing(transform: Any) -> None:
    layer, tokens = make_layer(), Tokens()
    keys, values = tokens.next(3)
    before = Tokens(1)
    layer.update_and_fetch(*before.next(4))

    def step(keys: mx.array) -> mx.array:
        fetched, _ = layer.update_and_fetch(keys, values)
        return fetched.sum()

    with pytest.raises(ValueError, match=REFUSED):
        transform(step)(keys)
    assert layer.offset == 4
    assert shows(layer.keys_and_values(), before)


def test_a_traced_query_is_left_to_mlx() -> None:
    layer, tokens = make_layer(), Tokens()
    keys, values = layer.update_and_fetch(*tokens.next(4))
    reasons = []

    def attend(queries: mx.array) -> mx.array:
        answer = extension.attend(queries, keys, values, 0.3)
        reasons.append(answer)
        return mx.fast.scaled_dot_product_attention(queries, tokens.keys, tokens.values, scale=0.3)

    mx.eval(mx.grad(lambda queries: attend(queries).sum())(mx.ones((1, 2, 1, 16))))
    assert reasons == ["inside a transformation"]
