"""Keys in one format and values in another."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import kvpool
import mlx.core as mx
import pytest
from kvpool import build_paged_caches, load_prompt_cache, save_prompt_cache
from kvpool._mlx_module import extension
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.formats import FORMATS
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm.paged import AgePolicy, PagedKVCache
from tiny_models import tiny_gemma3, tiny_llama

HEADS, DIMS, BLOCK_SIZE = 2, 64, 16
ON_GPU = extension.default_backend() == "cuda"
MANY_QUERIES = "more than 8 queries on the GPU: gathered, then ordinary attention"


def make_pool(n_blocks: int = 512) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=BLOCK_SIZE, n_blocks=n_blocks))


def numbers(n_tokens: int, seed: int = 1) -> mx.array:
    return mx.random.normal((1, HEADS, n_tokens, DIMS), key=mx.random.key(seed))


def filled(n_tokens: int, pool: BlockPoolAllocator | None = None, **options) -> PagedKVCache:
    cache = PagedKVCache(pool or make_pool(), 1, **options)
    cache.update_and_fetch(numbers(n_tokens), numbers(n_tokens, seed=2))
    return cache


def held(cache: PagedKVCache) -> dict[tuple[str, str], int]:
    """Blocks by stream and format."""
    blocks = cache.pool.blocks_for(cache.owner)
    kinds = [(block.stream, block.format) for block in blocks]
    return {kind: kinds.count(kind) for kind in set(kinds)}


@pytest.mark.parametrize(
    "format", ["int8/int4", "int4/int8", "fp16/int3", "auto/int2", "bf16/auto"]
)
def test_each_stream_is_as_exact_as_its_format(format):
    of_keys, of_values = format.split("/")
    apart = filled(70, format=format)
    assert set(held(apart)) == {
        ("k", of_keys.replace("auto", "fp32")),
        ("v", of_values.replace("auto", "fp32")),
    }
    assert mx.array_equal(apart.keys, filled(70, format=of_keys).keys)
    assert mx.array_equal(apart.values, filled(70, format=of_values).values)
    assert f"format={format}" in repr(apart)


def test_the_bytes_are_those_of_the_pages_of_both():
    cache = filled(70, format="int8/int4")
    shape = (HEADS, BLOCK_SIZE, DIMS)
    both = FORMATS["int8"].page_bytes(*shape) + FORMATS["int4"].page_bytes(*shape)
    assert both == HEADS * BLOCK_SIZE * (DIMS * (8 + 4) // 8 + 2 * 4)
    assert cache.nbytes == 5 * both


def test_a_byte_budget_ends_after_as_many_blocks_of_both():
    shape = (HEADS, BLOCK_SIZE, DIMS)
    both = FORMATS["int8"].page_bytes(*shape) + FORMATS["int4"].page_bytes(*shape)
    model, pool = SimpleNamespace(layers=[None]), make_pool()
    (cache,) = build_paged_caches(model, pool, 1, format="int8/int4", byte_budget=3 * both)
    cache.update_and_fetch(numbers(3 * BLOCK_SIZE), numbers(3 * BLOCK_SIZE))
    with pytest.raises(BlockPoolExhaustedError):
        cache.update_and_fetch(numbers(1), numbers(1))
    assert cache.offset == 3 * BLOCK_SIZE and cache.nbytes == 3 * both
    cache.check_invariants()


@pytest.mark.parametrize("n_queries", [1, 9])
@pytest.mark.parametrize(
    "options",
    [
        {"format": "int8/int4"},
        {"format": "fp16/int8", "window": 40},
        {"age_policy": "fp16:32,int8/int4:32,int4"},
    ],
    ids=str,
)
def test_attention_reads_the_numbers_that_the_pages_hold(options, n_queries):
    cache = PagedKVCache(make_pool(), 1, **options)
    cache.update_and_fetch(numbers(100), numbers(100, seed=2))
    mask = cache.make_mask(n_queries)
    keys, values = cache.update_and_fetch(numbers(n_queries, seed=3), numbers(n_queries, seed=4))
    queries = mx.random.normal((1, 2 * HEADS, n_queries, DIMS), key=mx.random.key(9))
    answer = extension.attend(queries, keys, values, 0.125, mask)
    if ON_GPU and n_queries > 8:
        assert answer == MANY_QUERIES
        return
    dense = [mx.array(array) for array in cache.keys_and_values()]
    expected = mx.fast.scaled_dot_product_attention(queries, *dense, scale=0.125, mask=mask)
    # Where there are instructions for it, single queries meet codes as codes of 16 bits.
    assert mx.allclose(answer, expected, atol=1e-4)


def test_a_policy_demotes_keys_and_values_at_ages_of_their_own():
    cache = PagedKVCache(make_pool(), 1, age_policy="fp16:32,int8/int4:64,int4")
    for _ in range(16):
        mx.eval(cache.update_and_fetch(numbers(16), numbers(16, seed=2)))
    # 2 blocks are young, 4 of middle age, 10 old; each age may last a block longer.
    kinds = held(cache)
    assert set(kinds) == {("k", "fp16"), ("k", "int8"), ("k", "int4"), ("v", "fp16"), ("v", "int4")}
    assert kinds["k", "fp16"] == kinds["v", "fp16"] and 2 <= kinds["k", "fp16"] <= 3
    assert 4 <= kinds["k", "int8"] <= 5
    cache.check_invariants()


@pytest.mark.parametrize(
    ("text", "keys", "values"),
    [
        ("fp16:1,int8/int4", [("int8", 1)], [("int4", 1)]),
        ("fp16:1,int8/int4:2,int4", [("int8", 1), ("int4", 3)], [("int4", 1)]),
        ("int8:1,int8/int4", [], [("int4", 1)]),
        ("int8/fp16:1,int8/int4", [], [("int4", 1)]),
        ("auto/int8:1,int8/int4", [("int8", 1)], [("int4", 1)]),
    ],
)
def test_a_policy_says_when_a_stream_changes(text, keys, values):
    policy = AgePolicy.parse(text)
    assert str(policy) == text
    first = (policy.first or "auto").split("/")
    assert policy.stream_steps(0, first[0]) == keys
    assert policy.stream_steps(1, first[-1]) == values


@pytest.mark.parametrize(
    "text", ["int8/int4:1,int4/int8", "fp16:1,int8/int4:2,int8/int4", "int4:1,int8/int4"]
)
def test_a_policy_that_widens_or_changes_nothing_is_refused(text):
    with pytest.raises(ValueError, match="must be narrower than"):
        AgePolicy.parse(text)


def test_equal_formats_are_one():
    policy = AgePolicy.parse("fp16/fp16:1,int4/int4")
    assert str(policy) == "fp16:1,int4"
    assert "format=int4)" in repr(PagedKVCache(make_pool(), 1, format="int4/int4"))


@pytest.mark.parametrize(
    "format", ["int8/", "/int4", "int8/int4/int4", "int8/int5", "int8,int4", ""]
)
def test_what_is_no_format_is_refused(format):
    with pytest.raises(ValueError, match=r"\[PagedKVCache\] format must be one of .*int8/int4"):
        PagedKVCache(make_pool(), 1, format=format)
    for wrong in (8, None, ("int8", "int4")):
        with pytest.raises(TypeError, match="format must be a str"):
            PagedKVCache(make_pool(), 1, format=wrong)


def test_a_fork_a_state_and_a_batch_keep_both_formats():
    cache = filled(40, format="int8/int4")
    twin = copy.deepcopy(cache)
    again = PagedKVCache.from_state(cache.state)
    again.attach(make_pool(), 5)
    batch = PagedKVCache.merge([cache, twin])
    (row, _) = (batch.extract(i) for i in range(2))
    for other in (twin, again, row):
        other.update_and_fetch(numbers(40), numbers(40))
        assert set(held(other)) == {("k", "int8"), ("v", "int4")}
        assert repr(other).endswith("format=int8/int4)")
        other.check_invariants()


@pytest.mark.parametrize("model", [tiny_llama(), tiny_gemma3()], ids=["llama", "gemma3"])
def test_a_prompt_goes_through_a_file(model, tmp_path):
    file, pool = tmp_path / "prompt.safetensors", make_pool()
    caches = build_paged_caches(model, pool, 1, format="int8/int4")
    prompt = mx.array([[3 * i % 50 for i in range(37)]])
    with kvpool.attention():
        mx.eval(model(prompt, cache=caches))
        save_prompt_cache(file, caches)
        loaded = load_prompt_cache(file, make_pool(), 7, model=model)
        assert {
            block.format
            for block in loaded[0].pool.blocks_for(
                7,
            )
        } == {"int8", "int4"}
        assert [cache.nbytes for cache in loaded] == [cache.nbytes for cache in caches]
        answers = [model(mx.array([[5]]), cache=each) for each in (caches, loaded)]
    # Numbers that were rounded before round to themselves, or next to it.
    assert mx.allclose(*answers, atol=0.05)


def test_a_batch_gives_what_each_request_gives_alone():
    model = tiny_llama()
    prompts = [[7 * i % 50 for i in range(21)], [5 * i % 50 for i in range(40)]]
    before = kvpool.attention_stats()
    with kvpool.attention():
        alone = []
        for prompt in prompts:
            caches = build_paged_caches(model, make_pool(), 1, format="int8/int4")
            mx.eval(model(mx.array([prompt]), cache=caches))
            alone.append(model(mx.array([[9]]), cache=caches))
        pool, rows = make_pool(), []
        for prompt in prompts:
            caches = build_paged_caches(model, pool, pool.new_owner(), format="int8/int4")
            mx.eval(model(mx.array([prompt]), cache=caches))
            rows.append(caches)
        batch = [PagedKVCache.merge(layer) for layer in zip(*rows, strict=True)]
        together = model(mx.array([[9], [9]]), cache=batch)
    gathered = set(kvpool.attention_stats().since(before).fell_back)
    assert gathered <= ({MANY_QUERIES} if ON_GPU else set())
    assert mx.allclose(together, mx.concatenate(alone), atol=1e-3 if ON_GPU else 1e-4)


def test_a_pool_is_sized_for_both_formats():
    model = tiny_llama()
    plain = PoolConfig.for_model(model, memory="1MB", paged=True)
    apart = PoolConfig.for_model(model, memory="1MB", paged=True, format="int8/int4")
    pool = BlockPoolAllocator(apart)
    caches = build_paged_caches(model, pool, 1, format="int8/int4")
    n_tokens = apart.sizing.tokens_per_sequence
    assert n_tokens > 2 * plain.sizing.tokens_per_sequence
    mx.eval(model(mx.zeros((1, n_tokens), mx.int32), cache=caches))
    assert sum(cache.nbytes for cache in caches) == apart.sizing.n_bytes <= 10**6
    with pytest.raises(ValueError, match="format needs paged=True"):
        PoolConfig.for_model(model, memory="1MB", format="int8")
    with pytest.raises(ValueError, match=r"\[PoolConfig::for_model\] format must be one of"):
        PoolConfig.for_model(model, memory="1MB", paged=True, format="int8/fp8")
