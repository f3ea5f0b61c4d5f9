"""Age policies whose numbers of tokens are as large as an int can be."""

from __future__ import annotations

import mlx.core as mx
import pytest
from kvpool import AgePolicy, PagedKVCache
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig

MOST = 2**63 - 1


def test_ages_that_do_not_add_up_are_refused_when_the_policy_is_made():
    with pytest.raises(ValueError, match=rf"must add up to 64 bits, got {MOST + 1} tokens"):
        AgePolicy(MOST, [("int8", 1), ("int4", None)])


@pytest.mark.parametrize("policy", [f"auto:{MOST},int8", f"auto:0,int8:{MOST},int4"])
def test_what_never_grows_so_old_stays(policy):
    cache = PagedKVCache(
        BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=64)), 1, age_policy=policy
    )
    data = mx.random.normal((1, 2, 20, 64), key=mx.random.key(1))
    mx.eval(cache.update_and_fetch(data, data))
    near = mx.max(mx.abs(cache.keys - data)).item()
    assert near < 0.05
    cache.check_invariants()
