"""Random calls on the caches of two requests over one pool, against a model that is a list."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from cache_kinds import PAGED, POOLED, Kind, in_use, make_pool, offsets
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.mlx_lm.caches import attach_caches, rewind_step
from mlx_lm.models.cache import trim_prompt_cache

REQUEST = st.integers(0, 1)


class Request:
    """Caches, the tokens they ought to hold, and those they held before the last step."""

    def __init__(self, caches: list) -> None:
        self.caches = caches
        self.tokens: list[float] = []
        self.before: list[float] | None = None


class Calls(RuleBasedStateMachine):
    """The calls that every kind of cache answers alike."""

    kind: Kind
    n_sequences: int

    @initialize(
        block_size=st.integers(1, 8),
        n_blocks=st.integers(20, 600),
        separate=st.booleans(),
        step=st.sampled_from([None, 1, 5, 16]),
        n_layers=st.integers(1, 3),
    )
    def start(self, block_size, n_blocks, separate, step, n_layers):
        self.pool = make_pool(n_blocks, block_size, separate_kv=separate)
        self.next_token = 1.0
        options = {} if self.kind.paged else {"step": step}
        self.requests = [
            Request(self.kind.layers(self.pool, n_layers, -1, **options)) for _ in range(2)
        ]
        # Arrays that nobody has evaluated yet, with what they must show.
        self.readers: list[tuple[mx.array, list[float]]] = []

    def rows(self, tokens: list[float]) -> mx.array:
        shape = (self.n_sequences, 2, len(tokens), 3)
        return mx.broadcast_to(mx.array(tokens).reshape(1, 1, len(tokens), 1), shape)

    @rule(which=REQUEST, n=st.integers(0, 40), keep=st.booleans())
    def read_a_prompt(self, which, n, keep):
        self.append(which, n, keep)

    @rule(which=REQUEST, n=st.integers(1, 20))
    def decode(self, which, n):
        for _ in range(n):
            self.append(which, 1)

    def append(self, which: int, n: int, keep: bool = False) -> None:
        request = self.requests[which]
        new = [self.next_token + i for i in range(n)]
        data = self.rows(new)
        before = offsets(request.caches), self.pool.stats.blocks_in_use()
        try:
            fetched = [cache.update_and_fetch(data, data) for cache in request.caches]
        except BlockPoolExhaustedError as error:
            assert error.tokens_that_fit < n
            assert offsets(request.caches) == before[0]
            assert self.kind.paged or self.pool.stats.blocks_in_use() == before[1]
            return
        if n > 0:
            request.before, request.tokens = request.tokens, request.tokens + new
            self.next_token += n
        if keep and request.tokens:
            self.readers.append((fetched[-1][0], request.tokens))
            return
        for keys, values in fetched:
            assert keys.shape == values.shape and keys.shape[2] == len(request.tokens)
            assert keys[-1, 1, :, 2].tolist() == request.tokens

    @rule()
    def read(self):
        for array, tokens in self.readers:
            assert array[0, 0, :, 0].tolist() == tokens
        self.readers = []

    @rule(which=REQUEST, n=st.integers(0, 12))
    def trim(self, which, n):
        request = self.requests[which]
        dropped = trim_prompt_cache(request.caches, n)
        assert dropped == min(n, len(request.tokens))
        request.tokens = request.tokens[: len(request.tokens) - dropped]
        request.before = None

    @precondition(lambda self: len(self.requests[0].caches) > 1)
    @rule(which=REQUEST, n=st.integers(1, 9))
    def cut_a_step_short(self, which, n):
        request = self.requests[which]
        try:
            request.caches[0].update_and_fetch(self.rows([0.0] * n), self.rows([0.0] * n))
        except BlockPoolExhaustedError:
            return
        request.caches[0].make_mask(1, return_array=False, window_size=None)  # the next step begins
        request.before = None

    @precondition(lambda self: any(len(request.tokens) > 40 for request in self.requests))
    @rule(which=REQUEST)
    def release(self, which):
        request = self.requests[which]
        request.caches[-1].release()
        request.tokens, request.before = [], None

    @rule(which=REQUEST, origin=REQUEST)
    def replace_by_a_copy(self, which, origin):
        request, other = self.requests[which], self.requests[origin]
        try:
            twins = copy.deepcopy(other.caches)
        except BlockPoolExhaustedError:
            assert not self.kind.paged, "a fork takes no blocks"
            return
        request.caches, request.tokens, request.before = twins, other.tokens, None

    @rule(which=REQUEST)
    def reload(self, which):
        request = self.requests[which]
        twins: list[Any] = [self.kind.cls.from_state(cache.state) for cache in request.caches]
        if not self.kind.paged:
            request.caches = twins  # the blocks of the old ones go, and are enough
        try:
            attach_caches(twins, self.pool, owner=3 + which)
        except BlockPoolExhaustedError:
            assert self.kind.paged
            return
        request.caches, request.before = twins, None

    @invariant()
    def books_hold(self):
        if not hasattr(self, "requests"):
            return
        held = 0
        for request in self.requests:
            for cache in request.caches:
                cache.check_invariants()
                assert cache.offset == len(request.tokens)
                assert cache.n_blocks_held() == self.kind.blocks_charged(cache)
                held += cache.n_blocks_held()
        assert self.kind.paged or self.pool.stats.blocks_in_use() == held
        self.pool.check_invariants()

    def teardown(self):
        if hasattr(self, "requests"):
            self.read()
            del self.requests
            assert in_use(self.pool) == 0


class PooledCalls(Calls):
    kind, n_sequences = POOLED, 2

    @rule(which=REQUEST)
    def rewind(self, which):
        request = self.requests[which]
        n = rewind_step(request.caches)
        if request.before is None:
            assert n == 0
        else:
            assert n == len(request.tokens) - len(request.before)
            request.tokens, request.before = request.before, None


class PagedCalls(Calls):
    kind, n_sequences = PAGED, 1


TestPooled = PooledCalls.TestCase
TestPaged = PagedCalls.TestCase
TestPooled.settings = settings(
    max_examples=70, stateful_step_count=30, deadline=None, derandomize=True
)
TestPaged.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True
)
