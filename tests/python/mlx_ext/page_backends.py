"""The places where pages may lie, what their kernels cover, and pools whose pages were used before.

A test that takes the fixture `backend` runs once for each: a contract of all of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import pytest
from kvpool import BlockPoolAllocator
from kvpool._mlx_module import extension
from paged_layers import Tokens, make_group, make_layer, make_pool

DTYPES = {"fp32": mx.float32, "fp16": mx.float16, "bf16": mx.bfloat16}
NAMES = ("cpu", "cuda", "gather")


@dataclass(frozen=True)
class Pages:
    """How the pages of a test's layers are laid out."""

    format: str = "fp16"
    tiers: tuple[tuple[str, int], ...] = ()
    heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    block_size: int = 16
    window: int = 0

    @property
    def formats(self) -> tuple[str, ...]:
        return (self.format, *(name for name, _ in self.tiers))

    @property
    def exact(self) -> bool:
        """Tokens of the pages' dtype come back as they were."""
        return not self.tiers and self.format in DTYPES

    def layer(self, group: Any) -> Any:
        return make_layer(
            group,
            heads=self.heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            format=self.format,
            tiers=list(self.tiers),
            window=self.window,
        )

    def tokens(self, seed: int = 0, dtype: mx.Dtype | None = None) -> Tokens:
        """Of a dtype that pages of floats hold as they are, unless told. Codes are gathered in the
        tokens' dtype: as fp32, which does not round them."""
        return Tokens(
            seed,
            heads=self.heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=dtype or (DTYPES[self.format] if self.exact else mx.float32),
        )

    def queries(
        self,
        ratio: int = 4,
        n: int = 1,
        *,
        batch: int = 1,
        dtype: mx.Dtype = mx.float32,
        seed: int = 99,
    ) -> mx.array:
        shape = (batch, self.heads * ratio, n, self.key_dim)
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


@dataclass
class Backend:
    """A place for pages, and what attention there promises."""

    name: str
    device: Any
    kept: list[Any] = field(default_factory=list, repr=False)

    def pool(self, n_blocks: int = 512, block_size: int = 16) -> BlockPoolAllocator:
        pool = make_pool(n_blocks, block_size)
        extension.PagedPool.of(pool, backend=self.name)
        return pool

    def used_pool(self, pages: Pages, n_tokens: int = 300) -> BlockPoolAllocator:
        """A pool with room for a few layers, and used pages for so many tokens of one.

        Those of each format held NaN and came back out of order: page tables are shuffled, and
        what a sequence has not written yet is NaN.
        """
        pool = self.pool(8192, pages.block_size)
        spoiled = [
            mx.full((1, pages.heads, pages.block_size * n, dim), float("nan"))
            for n in [-(-n_tokens // (pages.block_size * 30))]
            for dim in (pages.key_dim, pages.value_dim)
        ]
        for name in dict.fromkeys(pages.formats):
            groups = [make_group(pool, 10_000 + i) for i in range(12)]
            layers = [replace(pages, format=name, tiers=(), window=0).layer(g) for g in groups]
            for _ in range(4):
                for layer in layers:
                    layer.update_and_fetch(*spoiled)
            mx.eval([layer.order for layer in layers])
            # Memory that is empty goes back to the system: some pages stay.
            self.kept += layers[::4]
            for i in random.Random(5).sample(range(12), 12):
                if i % 4:
                    groups[i].release()
        self.settle()
        return pool

    def settle(self) -> None:
        """Blocks come back from a GPU when it has done with them."""
        mx.synchronize()

    def why_gathered(self, pages: Pages, n_queries: int = 1, has_mask: bool = False) -> str | None:
        """A part of the reason why a call is not answered by kernels; None where it is."""
        if self.name == "gather":
            return "no kernels that read pages on this device"
        if self.name == "cpu":
            return None
        if n_queries > 8:
            return "more than 8 queries on the GPU"
        if has_mask:
            return "a mask on the GPU"
        if not {"fp16", "bf16", "int8", "int4"}.issuperset(pages.formats):
            return "pages of a format"
        if pages.block_size not in (16, 32, 64, 128, 256):
            return "a block size on the GPU"
        if not {64, 128, 192, 256}.issuperset((pages.key_dim, pages.value_dim)):
            return "a head_dim on the GPU"
        return None

    def attend(
        self,
        pages: Pages,
        queries: mx.array,
        fetched: tuple[mx.array, mx.array],
        scale: float,
        mask: Any = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Who the backend says answers; MLX's own attention where it says that is not its kernels.

        The hook of the package goes the same two ways.
        """
        answer = extension.attend(queries, *fetched, scale, mask, sinks)
        reason = self.why_gathered(pages, queries.shape[2], isinstance(mask, mx.array))
        if reason is None:
            assert isinstance(answer, mx.array), answer
            return answer
        assert isinstance(answer, str) and reason in answer
        return mx.fast.scaled_dot_product_attention(
            queries, *fetched, scale=scale, mask=mask, sinks=sinks
        )

    def tolerance(self, pages: Pages, dtype: mx.Dtype, by_kernel: bool = True) -> float:
        """Of ``attention_oracle.error``, for answers of this dtype."""
        by_kernel = by_kernel and self.name != "gather"
        if dtype != mx.float32:
            return 4e-3 if by_kernel else 1e-2
        if self.device == mx.gpu:
            # The kernel's products are of halves; MLX's own are of TF32.
            return 3e-4 if by_kernel else 3e-3
        # The CPU's kernels take codes times queries in 8 bits twice.
        if not by_kernel:
            return 1e-5
        return 2e-6 if set(DTYPES).issuperset(pages.formats) else 5e-3


def find(name: str) -> Backend:
    """Skips the test where the machine has no such backend."""
    if name == "cuda":
        try:
            extension.PagedPool.of(make_pool(), backend=name)
        except ValueError as error:
            pytest.skip(str(error))
        return Backend(name, mx.gpu)
    if name == "cpu":
        return Backend(name, mx.cpu)
    return Backend(name, mx.gpu if extension.default_backend() != "cpu" else mx.cpu)
