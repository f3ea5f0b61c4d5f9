"""Random calls on the caches of two requests over one pool, against a model that is a list."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import mlx.core as mx
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.memory.pool_backed_cache import PoolBackedKVCache, build_pooled_caches
from kvpool.mlx_lm.caches import attach_caches, rewind_step
from mlx_lm.models.cache import trim_prompt_cache

BATCH = 2
COUNTS = st.integers(0, 40)


class Request:
    """Caches, the tokens they ought to hold, and those they held before the last step."""

    def __init__(self, caches: list) -> None:
        self.caches = caches
        self.tokens: list[float] = []
        self.before: list[float] | None = None


class Caches(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 8),
        n_blocks=st.integers(20, 600),
        separate=st.booleans(),
        step=st.sampled_from([None, 1, 5, 16]),
        n_layers=st.integers(1, 3),
    )
    def start(self, block_size, n_blocks, separate, step, n_layers):
        self.pool = BlockPoolAllocator(
            PoolConfig(block_size=block_size, n_blocks=n_blocks, separate_kv=separate)
        )
        self.next_token = 1.0
        model = SimpleNamespace(layers=[None] * n_layers)
        self.requests = [
            Request(build_pooled_caches(model, self.pool, owner=-1, step=step)) for _ in range(2)
        ]

    @rule(which=st.integers(0, 1), n=COUNTS)
    def read_a_prompt(self, which, n):
        self.append(which, n)

    @rule(which=st.integers(0, 1), n=st.integers(1, 20))
    def decode(self, which, n):
        for _ in range(n):
            self.append(which, 1)

    def append(self, which, n):
        request = self.requests[which]
        new = [self.next_token + i for i in range(n)]
        data = mx.broadcast_to(mx.array(new).reshape(1, 1, n, 1), (BATCH, 1, n, 2))
        before = self.pool.stats.blocks_in_use()
        try:
            fetched = [cache.update_and_fetch(data, data) for cache in request.caches]
        except BlockPoolExhaustedError as error:
            assert error.tokens_that_fit < n
            assert self.pool.stats.blocks_in_use() == before
            return
        if n > 0:
            request.before = list(request.tokens)
            request.tokens += new
            self.next_token += n
        for keys, values in fetched:
            assert keys[BATCH - 1, 0, :, 0].tolist() == request.tokens
            assert values.shape == keys.shape

    @rule(which=st.integers(0, 1), n=st.integers(0, 12))
    def trim(self, which, n):
        request = self.requests[which]
        dropped = trim_prompt_cache(request.caches, n)
        assert dropped == min(n, len(request.tokens))
        request.tokens = request.tokens[: len(request.tokens) - dropped]
        request.before = None

    @rule(which=st.integers(0, 1))
    def rewind(self, which):
        request = self.requests[which]
        expected = request.before
        n = rewind_step(request.caches)
        if expected is None:
            assert n == 0
        else:
            assert n == len(request.tokens) - len(expected)
            request.tokens, request.before = expected, None

    @precondition(lambda self: len(self.requests[0].caches) > 1)
    @rule(which=st.integers(0, 1), n=st.integers(1, 9))
    def cut_a_step_short(self, which, n):
        request = self.requests[which]
        data = mx.zeros((BATCH, 1, n, 2))
        try:
            request.caches[0].update_and_fetch(data, data)
        except BlockPoolExhaustedError:
            return
        request.caches[0].make_mask(
            1, return_array=False, window_size=None
        )  # what the next step starts with
        request.before = None

    @precondition(lambda self: any(len(request.tokens) > 40 for request in self.requests))
    @rule(which=st.integers(0, 1))
    def release(self, which):
        request = self.requests[which]
        request.caches[-1].release()
        request.tokens, request.before = [], None

    @rule(which=st.integers(0, 1))
    def replace_by_a_copy(self, which):
        request = self.requests[which]
        try:
            twins = copy.deepcopy(request.caches)
        except BlockPoolExhaustedError:
            return
        request.caches, request.before = twins, None

    @rule(which=st.integers(0, 1))
    def reload(self, which):
        request = self.requests[which]
        states = [cache.state for cache in request.caches]
        request.caches = [PoolBackedKVCache.from_state(state) for state in states]
        attach_caches(request.caches, self.pool, owner=3 + which)
        request.before = None

    @invariant()
    def books_hold(self):
        if not hasattr(self, "requests"):
            return
        held = 0
        for request in self.requests:
            for cache in request.caches:
                cache.check_invariants()
                assert cache.offset == len(request.tokens)
                rows = 0 if cache.keys is None else cache.keys.shape[2]
                blocks = 2 * BATCH * -(-rows // self.pool.config.block_size)
                assert cache.n_blocks_held() == blocks
                held += blocks
        assert self.pool.stats.blocks_in_use() == held
        self.pool.check_invariants()


TestCaches = Caches.TestCase
TestCaches.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, derandomize=True
)
