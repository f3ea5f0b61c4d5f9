"""What pages hold is the same wherever they lie, to the bit: written, aged, shared, rewritten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from kvpool._mlx_module import extension
from page_backends import Backend, Pages, find
from paged_layers import make_group, same, shows

# In system memory the CPU's code is what the others are compared with.
pytestmark = pytest.mark.parametrize("backend", ["cuda", "gather"], indirect=True)

FORMATS = ["fp32", "fp16", "bf16", "int8", "int4", "int3", "int2"]


def check_alike(
    backend: Backend, pages: Pages, story: Callable[[Any, Any], list[mx.array]]
) -> None:
    """`story(pool, layer)` gives the same arrays here and there."""
    shown = []
    for each in (backend, find("cpu")):
        pool = each.used_pool(pages)
        shown.append(story(pool, pages.layer(make_group(pool))))
        mx.eval(shown[-1])
        pool.check_invariants()
    for here, there in zip(*shown, strict=True):
        assert same(here, there)


def rows(pages: Pages, seed: int, n: int, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    return list(pages.tokens(seed, dtype).next(n))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dim", [6, 64, 70, 80, 128])
def test_every_format(backend: Backend, format: str, dim: int) -> None:
    pages = Pages(format, heads=3, key_dim=dim, value_dim=2 * dim, block_size=8)

    def story(pool: Any, layer: Any) -> list[mx.array]:
        layer.update_and_fetch(*rows(pages, 1, 50))
        return list(layer.update_and_fetch(*(5 * x for x in rows(pages, 2, 27))))

    check_alike(backend, pages, story)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_every_dtype(backend: Backend, format: str, dtype: mx.Dtype) -> None:
    pages = Pages(format)
    check_alike(
        backend,
        pages,
        lambda pool, layer: list(layer.update_and_fetch(*rows(pages, 3, 41, dtype))),
    )


@pytest.mark.parametrize("tiers", [(("int8", 32), ("int4", 64)), (("int4", 16),)])
@pytest.mark.parametrize("dim", [64, 96])
def test_aging(backend: Backend, tiers: tuple[tuple[str, int], ...], dim: int) -> None:
    pages = Pages("fp16", tiers, key_dim=dim)

    def story(pool: Any, layer: Any) -> list[mx.array]:
        for step in range(20):
            layer.update_and_fetch(*rows(pages, step, 11))
        return list(layer.keys_and_values())

    check_alike(backend, pages, story)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1, 100, 6e4])
@pytest.mark.parametrize("offset", [0, 1000])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_numbers_of_any_size(backend: Backend, format: str, scale: float, offset: float) -> None:
    pages = Pages(format)
    check_alike(
        backend,
        pages,
        lambda pool, layer: list(
            layer.update_and_fetch(*(scale * x + offset for x in rows(pages, 4, 40)))
        ),
    )


@pytest.mark.parametrize("format", ["fp16", "int8", "int4"])
@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (1, 1000), (0.1, 100)])
def test_forks_and_trims(backend: Backend, format: str, scale: float, offset: float) -> None:
    pages = Pages(format)

    def some(seed: int, n: int) -> list[mx.array]:
        return [scale * x + offset for x in rows(pages, seed, n)]

    def story(pool: Any, layer: Any) -> list[mx.array]:
        before = layer.update_and_fetch(*some(1, 20))
        mx.eval(before)
        twin = layer.fork(make_group(pool, 7))
        of_twin = twin.update_and_fetch(*some(2, 5))
        # A tail that is copied is the same numbers, whatever else its block holds by now.
        for old, new in zip(before, of_twin, strict=True):
            assert mx.array_equal(old, new[:, :, :20])
        layer.trim(9)
        return [*of_twin, *layer.update_and_fetch(*some(3, 30)), *twin.keys_and_values()]

    check_alike(backend, pages, story)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dim", [6, 64, 70])
def test_a_batch_is_padded_with_zeros(backend: Backend, heads: int, dim: int) -> None:
    pages = Pages("bf16", heads=heads, key_dim=dim, value_dim=dim)

    def story(pool: Any, first: Any) -> list[mx.array]:
        layers = [first, *(pages.layer(make_group(pool, 5 + i)) for i in range(2))]
        for seed, (layer, n) in enumerate(zip(layers, (3, 5, 19), strict=True)):
            layer.update_and_fetch(*rows(pages, seed, n))
        return list(extension.fetch_batch(layers))

    check_alike(backend, pages, story)


@pytest.mark.parametrize("format", ["fp32", "fp16", "bf16"])
def test_tokens_come_back_as_they_were(backend: Backend, format: str) -> None:
    pages = replace(Pages(format), window=0)
    tokens = pages.tokens()
    layer = pages.layer(make_group(backend.used_pool(pages)))
    for n in (37, 1, 1, 50, 7):
        assert shows(layer.update_and_fetch(*tokens.next(n)), tokens)
