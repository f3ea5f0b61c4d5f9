"""Thousands of random calls against the naive pool, everything compared after each."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kvpool.memory import (
    Block,
    BlockPoolAllocator,
    BlockPoolExhaustedError,
    OwnerAlreadyActiveError,
    PoolConfig,
)
from naive_pool import NaivePool, NaiveReference, Shortage

OWNERS = st.integers(0, 3)
STREAMS = st.sampled_from(["k", "v"])
FORMATS = st.sampled_from(["fp16", "int4"])
LAYERS = st.integers(1, 3)


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 4),
        n_blocks=st.integers(1, 12),
        separate_kv=st.booleans(),
        grow=st.booleans(),
        room=st.none() | st.integers(0, 6),
    )
    def build(
        self, block_size: int, n_blocks: int, separate_kv: bool, grow: bool, room: int | None
    ) -> None:
        config = PoolConfig(
            block_size=block_size,
            n_blocks=n_blocks,
            separate_kv=separate_kv,
            grow_on_exhaustion=grow,
            max_blocks=None if room is None else n_blocks + room,
        )
        self.pool = BlockPoolAllocator(config)
        self.naive = NaivePool(config)
        self.pairs: list[tuple[Block, NaiveReference]] = []

    def remember(self, blocks: list[Block], references: list[NaiveReference]) -> None:
        assert len(blocks) == len(references)
        assert len({id(block) for block in blocks}) == len(blocks)
        self.pairs += zip(blocks, references, strict=True)

    def some(self, most: int) -> st.SearchStrategy[list[tuple[Block, NaiveReference]]]:
        return st.lists(st.sampled_from(self.pairs), max_size=most) if self.pairs else st.just([])

    @rule(stream=STREAMS, n_tokens=st.integers(1, 13), owner=OWNERS, format=FORMATS, layers=LAYERS)
    def allocate(self, stream: str, n_tokens: int, owner: int, format: str, layers: int) -> None:
        try:
            expected = self.naive.allocate(
                [self.naive.stream(stream)], n_tokens, owner, format, layers
            )
        except Shortage:
            with pytest.raises(BlockPoolExhaustedError):
                self.pool.allocate(stream, n_tokens, owner, format, layers=layers)
        else:
            blocks = self.pool.allocate(stream, n_tokens, owner, format, layers=layers)
            self.remember(blocks, expected[0])

    @rule(n_tokens=st.integers(1, 9), owner=OWNERS, format=FORMATS, layers=LAYERS)
    def allocate_kv(self, n_tokens: int, owner: int, format: str, layers: int) -> None:
        streams = [self.naive.stream("k"), self.naive.stream("v")]
        try:
            keys, values = self.naive.allocate(streams, n_tokens, owner, format, layers)
        except Shortage:
            with pytest.raises(BlockPoolExhaustedError):
                self.pool.allocate_kv(n_tokens, owner, format, layers=layers)
        else:
            k_blocks, v_blocks = self.pool.allocate_kv(n_tokens, owner, format, layers=layers)
            self.remember(k_blocks, keys)
            self.remember(v_blocks, values)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Live and stale handles in any order, some of them twice."""
        chosen = data.draw(self.some(6))
        self.pool.free(block for block, _ in chosen)
        for _, reference in chosen:
            self.naive.drop(reference)

    @rule(owner=OWNERS)
    def free_all(self, owner: int) -> None:
        self.pool.free_all(owner)
        self.naive.free_all(owner)

    @rule(owner=OWNERS)
    def register_owner(self, owner: int) -> None:
        if owner in self.naive.held or owner in self.naive.registered:
            with pytest.raises(OwnerAlreadyActiveError):
                self.pool.register_owner(owner)
        else:
            self.pool.register_owner(owner)
            self.naive.registered.add(owner)

    @rule(owner=OWNERS)
    def release_owner(self, owner: int) -> None:
        if owner in self.naive.held:
            with pytest.raises(ValueError, match="release_owner"):
                self.pool.release_owner(owner)
        else:
            self.pool.release_owner(owner)
            self.naive.release(owner)

    @rule(data=st.data(), n_used=st.integers(-1, 5))
    def mark_used(self, data: st.DataObject, n_used: int) -> None:
        chosen = data.draw(self.some(4))
        blocks = [block for block, _ in chosen]
        allowed = 0 <= n_used <= self.naive.config.block_size and all(
            r.live and (r.block.references == 1 or r.block.n_used == n_used) for _, r in chosen
        )
        if allowed:
            self.pool.mark_used(blocks, n_used)
            for _, reference in chosen:
                reference.block.n_used = n_used
        else:
            with pytest.raises(ValueError, match="mark_used"):
                self.pool.mark_used(blocks, n_used)

    @rule(data=st.data(), format=FORMATS)
    def write_format(self, data: st.DataObject, format: str) -> None:
        if not self.pairs:
            return
        block, reference = data.draw(st.sampled_from(self.pairs))
        if reference.live and (reference.block.references == 1 or reference.block.format == format):
            block.format = format
            reference.block.format = format
        else:
            with pytest.raises(ValueError, match="set_format"):
                block.format = format

    @rule(owner=OWNERS, new_owner=OWNERS)
    def fork(self, owner: int, new_owner: int) -> None:
        if new_owner in self.naive.held:
            with pytest.raises(ValueError, match="new_owner"):
                self.pool.fork(owner, new_owner)
        else:
            expected = self.naive.fork(owner, new_owner)
            self.remember(self.pool.fork(owner, new_owner), expected)

    @rule(data=st.data())
    def writable(self, data: st.DataObject) -> None:
        if not self.pairs:
            return
        block, reference = data.draw(st.sampled_from(self.pairs))
        if not reference.live:
            with pytest.raises(ValueError, match="writable"):
                self.pool.writable(block)
            return
        try:
            expected = self.naive.writable(reference)
        except Shortage:
            with pytest.raises(BlockPoolExhaustedError):
                self.pool.writable(block)
            return
        fresh = self.pool.writable(block)
        if expected is reference:
            assert fresh is block
        else:
            self.remember([fresh], [expected])

    @rule(owner=OWNERS, n_tokens=st.integers(0, 9), layers=LAYERS)
    def reserve(self, owner: int, n_tokens: int, layers: int) -> None:
        n = len(self.naive.fills(n_tokens)) * layers
        try:
            self.naive.reserve(owner, self.naive.split(n, n))
        except Shortage:
            with pytest.raises(BlockPoolExhaustedError):
                self.pool.reserve(owner, n_tokens, layers=layers)
        else:
            self.pool.reserve(owner, n_tokens, layers=layers)

    @rule(stream=STREAMS, left=st.integers(0, 8))
    def shrink(self, stream: str, left: int) -> None:
        expected = self.naive.shrink(self.naive.stream(stream), left)
        assert self.pool.shrink(stream, left) == expected

    @invariant()
    def same_books(self) -> None:
        pool, naive = self.pool, self.naive
        pool.check_invariants()
        stats = pool.stats.snapshot()
        assert stats.n_blocks == naive.n_blocks
        assert stats.n_allocations == naive.n_allocations
        assert stats.n_frees == naive.n_frees
        assert stats.n_reused == naive.n_reused
        assert stats.n_exhausted == naive.n_exhausted
        assert stats.n_grown == naive.n_grown
        assert stats.n_retired == naive.n_retired
        assert stats.peak_blocks_in_use == naive.peak
        assert stats.blocks_in_use() == len(naive.blocks())
        assert stats.unused_slots() == naive.unused_slots()
        assert 0.0 <= stats.fragmentation() <= 1.0
        assert stats.fragmentation() == (
            naive.fragmented() / naive.n_blocks if naive.n_blocks else 0.0
        )

    @invariant()
    def same_lists(self) -> None:
        pool, naive = self.pool, self.naive
        for stream, free in naive.free.items():
            assert pool.n_free(stream) == len(free)
            assert pool.n_available(stream) == naive.available(stream)
            for owner in range(4):
                assert pool.n_reserved(stream, owner) == naive.n_reserved(stream, owner)
                growth = min(naive.headroom(), 10**9)
                if growth < 10**9:
                    free_to_owner = naive.available(stream, owner) + growth
                    assert pool.n_allocatable(stream, owner) == free_to_owner
        for owner in range(4):
            expected = [reference.block.id for reference in naive.held.get(owner, [])]
            assert [block.block_id for block in pool.blocks_for(owner)] == expected
            assert pool.is_active(owner) == naive.is_active(owner)

    @invariant()
    def same_blocks(self) -> None:
        for block, reference in self.pairs[-12:]:
            expected = reference.block
            assert (block.block_id, block.stream) == (expected.id, expected.stream)
            if reference.live:
                assert block.owner == reference.owner
                assert (block.n_used, block.format) == (expected.n_used, expected.format)
            else:
                assert (block.owner, block.n_used) == (None, 0)


PoolMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestPool = PoolMachine.TestCase
