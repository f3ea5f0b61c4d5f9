"""Random lives of a batch over a pool that is often too small, against a list of tokens."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from cache_kinds import PAGED, POOLED, WINDOWS, Kind, in_use, make_pool
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpool import BlockPoolExhaustedError

N_LAYERS = 2

moves = st.one_of(
    st.tuples(st.just("step"), st.just(1)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("join"), st.integers(0, 12)),
    st.tuples(st.just("leave"), st.integers(0, 5)),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("split"), st.integers(0, 5)),
)


class Life:
    """A batch of two layers, and the tokens that each of its sequences should hold."""

    def __init__(self, kind: Kind, n_blocks: int, separate_kv: bool, step: int | None) -> None:
        self.pool = make_pool(n_blocks, block_size=2, separate_kv=separate_kv)
        self.kind, self.options = kind, {} if kind.paged else {"step": step}
        self.batch: list = []
        self.tokens: dict[int, list[int]] = {}  # by owner, in the order of the rows
        self.drawn = 0

    def draw(self, n_tokens: int) -> list[int]:
        self.drawn += n_tokens
        return list(range(self.drawn - n_tokens, self.drawn))

    def feed(self, caches: list, new: list[list[int]]) -> None:
        array = mx.broadcast_to(
            mx.array(new, dtype=mx.float32)[:, None, :, None], (len(new), 1, len(new[0]), 2)
        )
        for cache in caches:
            cache.make_mask(len(new[0]), return_array=True, window_size=None)
            cache.update_and_fetch(array, -array)

    def request(self, owner: int, n_tokens: int) -> tuple[list, list[int]]:
        caches = self.kind.layers(self.pool, N_LAYERS, owner, **self.options)
        tokens = self.draw(n_tokens)
        if tokens:
            self.feed(caches, [tokens])
        return caches, tokens

    def move(self, name: str, argument: int) -> None:
        owners = list(self.tokens)
        row = argument % len(owners) if owners else 0
        if name == "join":
            owner = self.pool.new_owner()
            caches, tokens = self.request(owner, argument)
            self.extend([cache.merge([cache]) for cache in caches])
            self.tokens[owner] = tokens
        elif not owners:
            return
        elif name == "step":
            new = [self.draw(argument) for _ in owners]
            self.feed(self.batch, new)
            for tokens, more in zip(self.tokens.values(), new, strict=True):
                tokens += more
        elif name == "leave":
            self.filter([i for i in range(len(owners)) if i != row])
            del self.tokens[owners[row]]
        elif name == "end":
            done = [cache.extract(row) for cache in self.batch]
            self.filter([i for i in range(len(owners)) if i != row])
            tokens = self.tokens.pop(owners[row])
            assert all(cache.owner == owners[row] for cache in done)
            assert all(self.held(cache, 0, 0) == self.visible(tokens) for cache in done)
        else:
            # As mlx-lm splits a batch of prompts; here the part joins again.
            part = copy.deepcopy(self.batch)
            self.filter([i for i in range(len(owners)) if i != row])
            for cache in part:
                cache.filter([row])
            tokens = self.tokens.pop(owners[row])
            self.check()
            self.extend(part)
            self.tokens[owners[row]] = tokens

    def filter(self, keep: list[int]) -> None:
        for cache in self.batch:
            cache.filter(keep)
        if not keep:
            self.batch = []

    def extend(self, other: list) -> None:
        if not self.batch:
            self.batch = other
            return
        for cache, new in zip(self.batch, other, strict=True):
            cache.extend(new)

    def visible(self, tokens: list[int]) -> list[int]:
        if self.kind.window is None:
            return tokens
        # A step that is taken back may have let go of what the next query does not see.
        return tokens[-(self.kind.window - self.kind.paged) :]

    def held(self, cache, row: int, padding: int) -> list[int]:
        if cache.empty():
            return []
        keys = cache._temporal_order(cache.keys) if self.kind.ring else cache.keys_and_values()[0]
        tokens = [int(value) for value in keys[row, 0, max(padding, 0) :, 0].tolist()]
        return self.visible(tokens)

    def check(self) -> None:
        self.pool.check_invariants()
        for cache in self.batch:
            cache.check_invariants()
            assert list(cache.row_owners) == list(self.tokens)
            assert cache.offset.tolist() == [len(tokens) for tokens in self.tokens.values()]
            padding = cache.left_padding.tolist()
            for i, tokens in enumerate(self.tokens.values()):
                before = padding[i]
                if self.kind.paged and not cache.empty():  # which tells what the next query sees
                    width = cache.keys_and_values()[0].shape[2]
                    before = width - min(len(tokens), width)
                assert self.held(cache, i, before) == self.visible(tokens)


@pytest.mark.parametrize("kind", [POOLED, PAGED, *WINDOWS], ids=str)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    n_blocks=st.integers(24, 160),
    separate_kv=st.booleans(),
    step=st.sampled_from([None, 1, 6]),
    first=st.integers(0, 12),
    life=st.lists(moves, min_size=6, max_size=20),
)
def test_a_batch_that_runs_out_is_as_it_was(kind, n_blocks, separate_kv, step, first, life):
    batch = Life(kind, n_blocks, separate_kv, step)
    for name, argument in [("join", first), *life]:
        try:
            batch.move(name, argument)
        except BlockPoolExhaustedError:
            # Leaving and ending never need room; a part that cannot join again is dropped here.
            assert name in ("step", "join", "split")
        batch.check()
        if len(batch.tokens) > 5:
            break
    batch.filter([])
    batch.tokens.clear()
    assert in_use(batch.pool) == 0
    batch.pool.check_invariants()
