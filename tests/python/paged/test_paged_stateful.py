"""Random calls on the caches of requests over one pool, against a model that is a list."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import mlx.core as mx
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm import attach_caches
from kvpool.mlx_lm.paged import PagedKVCache, build_paged_caches
from mlx_lm.models.cache import trim_prompt_cache

COUNTS = st.integers(0, 40)


def rows(tokens: list[float]) -> mx.array:
    return mx.broadcast_to(mx.array(tokens).reshape(1, 1, len(tokens), 1), (1, 2, len(tokens), 3))


class Request:
    """Caches and the tokens they ought to hold."""

    def __init__(self, caches: list) -> None:
        self.caches = caches
        self.tokens: list[float] = []


class Caches(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 8),
        n_blocks=st.integers(20, 300),
        separate=st.booleans(),
        n_layers=st.integers(1, 3),
    )
    def start(self, block_size, n_blocks, separate, n_layers):
        self.pool = BlockPoolAllocator(
            PoolConfig(block_size=block_size, n_blocks=n_blocks, separate_kv=separate)
        )
        self.next_token = 1.0
        model = SimpleNamespace(layers=[None] * n_layers)
        self.requests = [Request(build_paged_caches(model, self.pool, owner=-1)) for _ in range(2)]
        # Arrays that nobody has evaluated yet, with what they must show.
        self.readers: list[tuple[mx.array, list[float]]] = []

    @rule(which=st.integers(0, 1), n=COUNTS, keep=st.booleans())
    def append(self, which, n, keep):
        request = self.requests[which]
        new = [self.next_token + i for i in range(n)]
        data = rows(new)
        before = [cache.offset for cache in request.caches]
        try:
            fetched = [cache.update_and_fetch(data, data) for cache in request.caches]
        except BlockPoolExhaustedError as error:
            assert error.tokens_that_fit < n
            assert [cache.offset for cache in request.caches] == before
            return
        request.tokens = request.tokens + new
        self.next_token += n
        if keep and request.tokens:
            self.readers.append((fetched[-1][0], request.tokens))
            return
        for keys, values in fetched:
            assert keys.shape == values.shape and keys.shape[2] == len(request.tokens)
            assert keys[0, 1, :, 2].tolist() == request.tokens

    @rule(which=st.integers(0, 1), n=st.integers(0, 12))
    def trim(self, which, n):
        request = self.requests[which]
        dropped = trim_prompt_cache(request.caches, n)
        assert dropped == min(n, len(request.tokens))
        request.tokens = request.tokens[: len(request.tokens) - dropped]

    @precondition(lambda self: len(self.requests[0].caches) > 1)
    @rule(which=st.integers(0, 1), n=st.integers(1, 9))
    def cut_a_step_short(self, which, n):
        request = self.requests[which]
        try:
            request.caches[0].update_and_fetch(rows([0.0] * n), rows([0.0] * n))
        except BlockPoolExhaustedError:
            return
        request.caches[0].make_mask(1)  # what the next step starts with

    @precondition(lambda self: any(len(request.tokens) > 40 for request in self.requests))
    @rule(which=st.integers(0, 1))
    def release(self, which):
        request = self.requests[which]
        request.caches[-1].release()
        request.tokens = []

    @rule(which=st.integers(0, 1))
    def replace_by_a_fork(self, which):
        self.requests[which].caches = copy.deepcopy(self.requests[which].caches)

    @rule(which=st.integers(0, 1))
    def fork_the_other(self, which):
        self.requests[which].caches = copy.deepcopy(self.requests[1 - which].caches)
        self.requests[which].tokens = self.requests[1 - which].tokens

    @rule(which=st.integers(0, 1))
    def reload(self, which):
        request = self.requests[which]
        twins = [PagedKVCache.from_state(cache.state) for cache in request.caches]
        try:
            attach_caches(twins, self.pool, owner=3 + which)
        except BlockPoolExhaustedError:
            return
        request.caches = twins

    @rule()
    def read(self):
        for array, tokens in self.readers:
            assert array[0, 0, :, 0].tolist() == tokens
        self.readers = []

    @invariant()
    def books_hold(self):
        if not hasattr(self, "requests"):
            return
        for request in self.requests:
            for cache in request.caches:
                cache.check_invariants()
                assert cache.offset == len(request.tokens)
                blocks = 2 * -(-len(request.tokens) // self.pool.config.block_size)
                assert cache.n_blocks_held() == blocks
        self.pool.check_invariants()

    def teardown(self):
        if hasattr(self, "requests"):
            self.read()
            del self.requests
            assert self.pool.stats.blocks_in_use() == 0


TestCaches = Caches.TestCase
TestCaches.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True
)
