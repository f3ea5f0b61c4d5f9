"""Attention over pages: every backend against the same oracle in double precision.

Pages were used before: page tables are shuffled, and what is not written yet is NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import attention_oracle as oracle
import mlx.core as mx
import numpy as np
import pytest
from kvpool._mlx_module import extension
from page_backends import Backend, Pages
from paged_layers import make_group

SCALE = 0.2
# No GPU's kernel reads the first; all read the second.
SMALL = Pages("fp32", key_dim=16, value_dim=8, block_size=8)
PAGES = Pages("fp16")
BOTH = pytest.mark.parametrize("pages", [SMALL, PAGES], ids=["small", "pages"])
WIDE = replace(PAGES, key_dim=128, value_dim=128)
KINDS = {
    "fp32": replace(WIDE, format="fp32"),
    "bf16": replace(WIDE, format="bf16"),
    "fp16": WIDE,
    "int8": replace(WIDE, format="int8"),
    "int4": replace(WIDE, format="int4"),
    "codes": replace(WIDE, format="int8", tiers=(("int4", 100),)),
    "aging": replace(WIDE, format="bf16", tiers=(("int8", 64), ("int4", 256))),
    "aging fp16": replace(WIDE, tiers=(("int4", 128),)),
    "few bits": replace(WIDE, format="int8", tiers=(("int3", 32), ("int2", 64))),
}


class Sequence:
    """A layer with tokens in pages that were used before."""

    def __init__(
        self, backend: Backend, pages: Pages, n_tokens: int, seed: int = 0, pool: Any = None
    ) -> None:
        self.backend, self.pages = backend, pages
        self.pool = backend.used_pool(pages, n_tokens + 100) if pool is None else pool
        self.layer = pages.layer(make_group(self.pool, seed))
        self.tokens = pages.tokens(seed)
        self.append(n_tokens)

    def append(self, n: int) -> None:
        self.fetched = self.layer.update_and_fetch(*self.tokens.next(n))

    def held(self) -> tuple[mx.array, mx.array]:
        """What the pages hold, of tokens in sight."""
        if not self.pages.exact or self.pages.window:
            return self.layer.keys_and_values()
        return self.tokens.keys, self.tokens.values

    def check(self, queries: mx.array, mask: Any = None, sinks: mx.array | None = None) -> None:
        answer = self.backend.attend(self.pages, queries, self.fetched, SCALE, mask, sinks)
        right = oracle.attention(queries, *self.held(), SCALE, mask, sinks)
        by_kernel = not self.backend.why_gathered(
            self.pages, queries.shape[2], isinstance(mask, mx.array)
        )
        allowed = self.backend.tolerance(self.pages, answer.dtype, by_kernel)
        assert oracle.error(answer, right) < allowed
        self.fetched = self.layer.keys_and_values()  # who gathers has evaluated the others


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_tokens", [1, 16, 17, 500, 3000])
def test_pages_of_every_format(backend: Backend, kind: str, n_tokens: int) -> None:
    Sequence(backend, KINDS[kind], n_tokens).check(KINDS[kind].queries())


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("kind", ["bf16", "int4", "aging"])
def test_every_block_size(backend: Backend, kind: str, block_size: int) -> None:
    pages = replace(KINDS[kind], block_size=block_size)
    for n_tokens in (block_size, 700):
        Sequence(backend, pages, n_tokens).check(pages.queries())


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 8, 12, 16])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 192, 256])
def test_grouped_queries_and_head_dims(backend: Backend, ratio: int, dim: int) -> None:
    for name in ("fp16", "int8", "int4"):
        pages = Pages(name, key_dim=dim, value_dim=dim)
        Sequence(backend, pages, 300).check(pages.queries(ratio))


@pytest.mark.parametrize("dims", [(128, 64), (64, 256), (192, 128)])
def test_values_of_other_dims_than_keys(backend: Backend, dims: tuple[int, int]) -> None:
    for name in ("bf16", "int4"):
        pages = Pages(name, key_dim=dims[0], value_dim=dims[1])
        Sequence(backend, pages, 300).check(pages.queries())


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("n_queries", [1, 3])
def test_half_precision(backend: Backend, dtype: mx.Dtype, n_queries: int) -> None:
    pages = Pages({mx.float16: "fp16", mx.bfloat16: "bf16"}[dtype])
    sequence = Sequence(backend, pages, 50)
    queries = pages.queries(n=n_queries, dtype=dtype)
    answer = backend.attend(pages, queries, sequence.fetched, SCALE, "causal")
    assert answer.dtype == dtype
    sequence.check(queries, "causal")


def test_queries_of_fp32_over_pages_of_halves(backend: Backend) -> None:
    for name in ("fp16", "bf16"):
        sequence = Sequence(backend, Pages(name), 300)
        queries = sequence.pages.queries()
        sequence.check(queries)
        sequence.check(20 * queries)  # a softmax that one token wins


@pytest.mark.parametrize("kind", ["bf16", "int8", "aging", "codes"])
def test_tokens_one_by_one(backend: Backend, kind: str) -> None:
    sequence = Sequence(backend, KINDS[kind], 250)
    for step in range(80):
        sequence.append(1)
        if step % 9 == 0:
            sequence.check(sequence.pages.queries())


@BOTH
@pytest.mark.parametrize("n_queries", [2, 8, 9, 40])
@pytest.mark.parametrize("mask", [None, "causal", "boolean", "additive", "rows"])
def test_many_queries_and_masks(
    backend: Backend, pages: Pages, n_queries: int, mask: str | None
) -> None:
    sequence = Sequence(backend, pages, 40)
    random = np.random.default_rng(5)
    arrays = {
        "boolean": mx.array(random.random((n_queries, 40)) < 0.7),
        "additive": mx.array(random.standard_normal((1, 4, n_queries, 40), dtype=np.float32)),
        "rows": mx.array(random.standard_normal((1, 1, 1, 40), dtype=np.float32)),
    }
    sequence.check(pages.queries(2, n_queries), arrays.get(mask, mask) if mask else None)


@pytest.mark.parametrize("kind", ["fp16", "int8", "int4", "aging"])
def test_a_chunk_of_queries_after_many_tokens(backend: Backend, kind: str) -> None:
    sequence = Sequence(backend, KINDS[kind], 900)
    for n in (2, 5, 8, 1):
        sequence.append(n)
        sequence.check(sequence.pages.queries(n=n), "causal")


@BOTH
@pytest.mark.parametrize("n_queries", [1, 5])
def test_sinks(backend: Backend, pages: Pages, n_queries: int) -> None:
    sequence = Sequence(backend, pages, 21)
    queries = pages.queries(2, n_queries)
    sinks = mx.array([0.5, -1.0, 2.0, 0.0])
    for given in (sinks, sinks.astype(mx.bfloat16), mx.repeat(sinks, 2)[::2]):
        sequence.check(queries, "causal", given)


def test_sinks_over_many_tokens_and_behind_a_window(backend: Backend) -> None:
    for window in (0, 100):
        sequence = Sequence(backend, replace(WIDE, window=window), 2000)
        sequence.append(1)
        queries = sequence.pages.queries()
        sequence.check(queries, None, 3 * mx.random.normal((8,), key=mx.random.key(4)))


@BOTH
def test_queries_of_any_strides(backend: Backend, pages: Pages) -> None:
    sequence = Sequence(backend, pages, 20)
    for n_queries in (1, 3):
        queries = pages.queries(2, n_queries)
        swapped = mx.contiguous(queries.swapaxes(1, 2)).swapaxes(1, 2)
        turned = mx.contiguous(queries.swapaxes(2, 3)).swapaxes(2, 3)
        for given in (swapped, turned, mx.repeat(queries, 2, axis=3)[..., ::2]):
            sequence.check(given, "causal")


@pytest.mark.parametrize("pages", [Pages("fp32", (), 1, 32, 8, 8), Pages("bf16", (), 1, 128, 64)])
def test_one_latent_as_keys_and_values(backend: Backend, pages: Pages) -> None:
    """Multi-head latent attention: the mask carries the scores of the rotary part."""
    sequence = Sequence(backend, pages, 30)
    queries = pages.queries()
    rotary_queries = mx.random.normal((1, 4, 1, pages.value_dim), key=mx.random.key(8))
    scores = (rotary_queries * SCALE) @ sequence.tokens.values.swapaxes(-1, -2)
    for mask in (None, scores):
        latent, _ = sequence.layer.keys_and_values()
        answer = backend.attend(pages, queries, (latent, latent), SCALE, mask)
        right = oracle.attention(queries, *[sequence.tokens.keys] * 2, SCALE, mask)
        by_kernel = mask is None and not backend.why_gathered(pages)
        allowed = backend.tolerance(pages, answer.dtype, by_kernel)
        assert oracle.error(answer, right) < allowed


@pytest.mark.parametrize(
    "pages",
    [
        replace(SMALL, window=12),
        replace(PAGES, window=20),
        *(replace(KINDS[kind], window=100) for kind in ("bf16", "int4", "codes")),
        replace(KINDS["int4"], window=100, block_size=64),
    ],
    ids=["small", "pages", "bf16", "int4", "codes", "large blocks"],
)
@pytest.mark.parametrize("n_queries", [1, 6])
def test_a_window_hides_what_its_first_pages_still_hold(
    backend: Backend, pages: Pages, n_queries: int
) -> None:
    sequence = Sequence(backend, pages, 300)
    for _ in range(3):
        sequence.append(n_queries)
    n_rows = sequence.layer.n_rows
    assert n_rows == pages.window + n_queries - 1
    ages = mx.arange(n_rows - n_queries, n_rows)[:, None] - mx.arange(n_rows)
    boolean = (ages >= 0) & (ages < pages.window)
    additive = mx.where(boolean, mx.array(0.5), mx.array(-1e9))
    masks = [boolean, additive, additive.astype(mx.float16)[None], boolean[None, None]]
    for mask in [None, *masks] if n_queries == 1 else masks:
        sequence.check(pages.queries(n=n_queries), mask)


@pytest.mark.parametrize("kind", ["bf16", "int4", "aging", "codes"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_sequences_of_unequal_length_in_one_call(
    backend: Backend, kind: str, block_size: int
) -> None:
    pages = replace(KINDS[kind], block_size=block_size)
    lengths = [1, block_size, 33, 1000, 257, 90]
    pool = backend.used_pool(pages, sum(lengths))
    sequences = [Sequence(backend, pages, n, i, pool) for i, n in enumerate(lengths)]
    fetched = extension.fetch_batch([s.layer for s in sequences])
    assert fetched[0].shape == (6, 2, 1000, 128)
    queries = pages.queries(batch=6)
    mask = (mx.arange(1000)[None] >= mx.array([[1000 - n] for n in lengths]))[:, None, None]
    # Who gathers needs the mask of the padding.
    for given in [mask] if backend.why_gathered(pages) else [None, mask]:
        fetched = extension.fetch_batch([s.layer for s in sequences])
        answer = backend.attend(pages, queries, fetched, SCALE, given)
        by_kernel = not backend.why_gathered(pages, has_mask=given is not None)
        for i, sequence in enumerate(sequences):
            right = oracle.attention(queries[i : i + 1], *sequence.held(), SCALE)
            allowed = backend.tolerance(pages, answer.dtype, by_kernel)
            assert oracle.error(answer[i : i + 1], right) < allowed
    padded = extension.fetch_batch([s.layer for s in sequences])
    for i, (sequence, n) in enumerate(zip(sequences, lengths, strict=True)):
        keys, values = sequence.held()
        for shown, right in zip(padded, (keys, values), strict=True):
            assert mx.array_equal(shown[i : i + 1, :, 1000 - n :], right)
            assert not shown[i, :, : 1000 - n].any()


@pytest.mark.parametrize("kind", ["fp16", "int4", "aging"])
@pytest.mark.parametrize("n_queries", [2, 5])
def test_chunks_of_sequences_of_unequal_length(backend: Backend, kind: str, n_queries: int) -> None:
    pages = KINDS[kind]
    lengths = [n_queries, 40, 333]
    pool = backend.used_pool(pages, sum(lengths))
    sequences = [Sequence(backend, pages, n, i, pool) for i, n in enumerate(lengths)]
    queries = pages.queries(n=n_queries, batch=3)
    mask: Any = "causal"
    if backend.why_gathered(pages, n_queries):
        columns = mx.arange(333)
        visible = columns[None, None] <= mx.arange(333 - n_queries, 333)[None, :, None]
        mask = visible & (columns >= mx.array([333 - n for n in lengths])[:, None, None])
        mask = mask[:, None]
    fetched = extension.fetch_batch([s.layer for s in sequences])
    answer = backend.attend(pages, queries, fetched, SCALE, mask)
    for i, sequence in enumerate(sequences):
        right = oracle.attention(queries[i : i + 1], *sequence.held(), SCALE, "causal")
        allowed = backend.tolerance(pages, answer.dtype)
        assert oracle.error(answer[i : i + 1], right) < allowed


@pytest.mark.parametrize("kind", ["bf16", "int8", "aging"])
def test_forks_and_trims(backend: Backend, kind: str) -> None:
    sequence = Sequence(backend, KINDS[kind], 330)
    twin = Sequence.__new__(Sequence)
    twin.__dict__.update(sequence.__dict__)
    twin.layer = sequence.layer.fork(make_group(sequence.pool, 7))
    twin.tokens = sequence.tokens.copy(7)
    twin.append(5)
    assert sequence.layer.trim(30) == 30
    sequence.tokens.trim(30)
    sequence.append(40)
    for each in (twin, sequence):
        each.check(each.pages.queries())
        each.append(1)
        each.check(each.pages.queries())
    sequence.pool.check_invariants()


def test_answers_do_not_change_from_run_to_run(backend: Backend) -> None:
    sequence = Sequence(backend, KINDS["aging"], 5000)
    queries = sequence.pages.queries()
    first, *others = (
        backend.attend(sequence.pages, queries, sequence.layer.keys_and_values(), SCALE)
        for _ in range(10)
    )
    assert all(mx.array_equal(first, other) for other in others)


def test_many_layers_in_one_evaluation(backend: Backend) -> None:
    pages = PAGES
    group = make_group(backend.used_pool(pages, 2000))
    layers = [pages.layer(group) for _ in range(24)]
    tokens = [pages.tokens(i) for i in range(len(layers))]
    for n in (37, 1, 1, 20, 1):
        x = y = pages.queries(n=n, dtype=mx.float16)
        for layer, own in zip(layers, tokens, strict=True):
            x = x + backend.attend(pages, x, layer.update_and_fetch(*own.next(n)), 0.125)
            y = y + mx.fast.scaled_dot_product_attention(y, own.keys, own.values, scale=0.125)
        assert mx.allclose(x, y, atol=0.05)


def test_attention_leaves_the_arrays_not_evaluated(backend: Backend) -> None:
    sequence = Sequence(backend, PAGES, 9)
    for _ in range(2):
        sequence.check(PAGES.queries())


def test_arrays_of_others_are_not_ours(backend: Backend) -> None:
    sequence = Sequence(backend, PAGES, 9)
    queries = PAGES.queries()
    keys, values = sequence.fetched
    assert extension.attend(queries, sequence.tokens.keys, sequence.tokens.values, SCALE) is None
    mx.eval(keys, values)
    assert extension.attend(queries, keys, values, SCALE) is None
    with pytest.raises(ValueError, match=r"^\[paged_attention\] .* must come from a paged cache"):
        extension.paged_attention(queries, keys, values, SCALE)


@pytest.mark.parametrize("kind", ["fp16", "int8", "aging"])
@pytest.mark.parametrize("n_queries", [9, 40])
def test_chunks_of_prompts_with_fewer_tokens_than_queries(
    backend: Backend, kind: str, n_queries: int
) -> None:
    pages = KINDS[kind]
    lengths = [1, 5, 333]
    pool = backend.used_pool(pages, sum(lengths))
    sequences = [Sequence(backend, pages, n, i, pool) for i, n in enumerate(lengths)]
    queries = pages.queries(n=n_queries, batch=3)
    # Prompts are padded on their right: the first queries are a sequence's newest tokens.
    new = mx.array([min(n, n_queries) for n in lengths])[:, None, None, None]
    seen = 333 - new + mx.arange(n_queries)[:, None]
    padding = mx.array([333 - n for n in lengths])[:, None, None, None]
    mask = (mx.arange(333) <= seen) & (mx.arange(333) >= padding)
    fetched = extension.fetch_batch([s.layer for s in sequences])
    by_kernel = not backend.why_gathered(pages, n_queries, has_mask=True)
    answer = backend.attend(pages, queries, fetched, SCALE, mask)
    held = extension.fetch_batch([s.layer for s in sequences])
    right = oracle.attention(queries, *held, SCALE, mask)
    assert oracle.error(answer, right) < backend.tolerance(pages, answer.dtype, by_kernel)


def test_what_the_kernels_do_not_cover_is_named(backend: Backend) -> None:
    sequence = Sequence(backend, PAGES, 9)
    keys, values = sequence.fetched
    other = Sequence(backend, PAGES, 9).fetched
    queries = PAGES.queries()

    def reason(*args: Any) -> str:
        answer = extension.attend(*args)
        assert isinstance(answer, str)
        with pytest.raises(ValueError, match=answer):
            extension.paged_attention(*args)
        return answer

    apart = "keys and values from different places"
    assert reason(queries, keys, sequence.tokens.values, SCALE) == apart
    assert reason(queries, keys, other[1], SCALE) == apart
    if backend.name == "gather":
        assert "no kernels" in reason(queries, keys, values, SCALE)
        return
    assert reason(queries[..., :16], keys, values, SCALE) == "shapes that do not fit"
    assert reason(queries[:, :3], keys, values, SCALE) == "shapes that do not fit"
    assert reason(queries, keys, values, SCALE, "banded") == "an unknown mask"
    integers = mx.zeros((1, 9), mx.int32)
    assert "neither boolean" in reason(queries, keys, values, SCALE, integers)
    assert reason(queries, keys, values, SCALE, mx.zeros((1, 8))) == "a mask that does not fit"
    assert reason(queries, keys, values, SCALE, None, mx.zeros(3)) == "sinks that do not fit"
    assert reason(PAGES.queries(n=10), keys, values, SCALE) == "more queries than tokens"


def test_a_call_that_is_not_covered_is_right_in_plain_mlx(backend: Backend) -> None:
    sequence = Sequence(backend, PAGES, 9)
    queries = PAGES.queries()
    plain = mx.fast.scaled_dot_product_attention(queries, *sequence.fetched, scale=SCALE)
    right = oracle.attention(queries, *sequence.held(), SCALE)
    assert oracle.error(plain, right) < backend.tolerance(PAGES, plain.dtype, by_kernel=False)


def test_a_batch_needs_layers_of_one_shape_that_hold_tokens(backend: Backend) -> None:
    pool = backend.pool(block_size=8)
    layer = SMALL.layer(make_group(pool))
    layer.update_and_fetch(*SMALL.tokens().next(3))
    with pytest.raises(ValueError, match=r"^\[fetch_batch\] the layers must hold tokens"):
        extension.fetch_batch([layer, SMALL.layer(make_group(pool))])
    wide = replace(SMALL, heads=4)
    other = wide.layer(make_group(pool))
    other.update_and_fetch(*wide.tokens().next(3))
    with pytest.raises(ValueError, match=r"^\[fetch_batch\] layers must have the same heads"):
        extension.fetch_batch([layer, other])
    with pytest.raises(ValueError, match=r"^\[fetch_batch\] layers must not be empty"):
        extension.fetch_batch([])


def test_pages_were_used_before(backend: Backend) -> None:
    """What this file relies on: no memory is taken for the tokens, and tables are not in order."""
    for kind in ("bf16", "int4"):
        pool = backend.used_pool(KINDS[kind], 1000)
        paged = extension.PagedPool.of(pool)
        committed = paged.committed_bytes
        sequence = Sequence(backend, KINDS[kind], 1000, pool=pool)
        mx.eval(sequence.layer.order)
        assert paged.committed_bytes == committed
        ids = [block.block_id for block in pool.blocks_for(0)]
        assert ids != sorted(ids)
