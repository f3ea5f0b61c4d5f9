"""Prompts saved to files and loaded into a pool, by kvpool and by mlx-lm."""

from __future__ import annotations

import json
import random
import struct

import mlx.core as mx
import pytest
from cache_kinds import decode as decode_tokens
from cache_kinds import prompt
from kvpool import (
    PromptCacheError,
    build_pooled_caches,
    load_prompt_cache,
    save_prompt_cache,
)
from kvpool._prompt_file import _digest
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm.caches import (
    PoolBackedKVCache,
    PoolBackedQuantizedKVCache,
    PoolBackedRotatingKVCache,
    attach_caches,
)
from mlx_lm.models import cache as stock
from tiny_models import (
    all_models,
    needs_quantised_attention,
    tiny_gemma3,
    tiny_llama,
)

PROMPT = prompt(21)


def make_pool(n_blocks: int = 4096, block_size: int = 4) -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=n_blocks))


def decode(model, cache, prompt) -> list[int]:
    return decode_tokens(model, cache, prompt, 16)


def processed(model, pool, owner: int = 1, n_tokens: int = 20):
    caches = build_pooled_caches(model, pool, owner)
    model(mx.array([PROMPT[:n_tokens]]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


def new_tokens(n_tokens: int, dims: int = 2, dtype=mx.float32) -> mx.array:
    numbers = mx.arange(n_tokens, dtype=dtype)
    return mx.broadcast_to(numbers[None, None, :, None], (1, 1, n_tokens, dims))


def filled(cache, n_tokens: int, dims: int = 2, dtype=mx.float32):
    new = new_tokens(n_tokens, dims, dtype)
    cache.update_and_fetch(new, -new)
    return cache


def books(pool) -> tuple[int, int, int]:
    stats = pool.stats
    return stats.blocks_in_use(), pool.n_free("k"), pool.n_available("v")


def check(pool, caches) -> None:
    pool.check_invariants()
    for cache in caches:
        if hasattr(cache, "check_invariants"):
            cache.check_invariants()


# --- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", all_models())
def test_generation_goes_on_after_mlx_lm_saved_and_loaded(tmp_path, name):
    model = all_models()[name]()
    expected = decode(model, stock.make_prompt_cache(model), PROMPT)
    saved, file = processed(model, make_pool()), tmp_path / "prompt.safetensors"
    pool = make_pool()
    stock.save_prompt_cache(str(file), saved)
    loaded = stock.load_prompt_cache(str(file))
    assert all(cache.pool is None for cache in loaded)
    attach_caches(loaded, pool, 7)
    assert [type(cache) for cache in loaded] == [type(cache) for cache in saved]
    assert pool.stats.blocks_in_use() == sum(cache.n_blocks_held() for cache in loaded) > 0
    assert decode(model, loaded, PROMPT[20:]) == expected
    check(pool, loaded)
    loaded[0].release()
    assert pool.stats.blocks_in_use() == 0


def test_a_quantised_prompt(tmp_path):
    needs_quantised_attention()
    model, pool, file = tiny_llama(), make_pool(), tmp_path / "prompt.safetensors"
    caches = processed(model, pool)
    caches = [cache.to_quantized(group_size=64, bits=8) for cache in caches]
    save_prompt_cache(file, caches)
    expected = decode(model, caches, PROMPT[20:])
    loaded = load_prompt_cache(file, pool, 2, model=model)
    assert [type(cache) for cache in loaded] == 3 * [PoolBackedQuantizedKVCache]
    assert {block.format for block in pool.blocks_for(2)} == {"int8"}
    assert decode(model, loaded, PROMPT[20:]) == expected
    check(pool, loaded)


def test_caches_that_are_not_pooled_are_kept_as_they_are(tmp_path):
    pool, file = make_pool(), tmp_path / "prompt.safetensors"
    arrays = stock.ArraysCache(2)
    arrays[0], arrays[1] = mx.arange(6).reshape(1, 3, 2), None
    both = stock.CacheList(filled(stock.KVCache(), 5), filled(PoolBackedKVCache(pool), 3))
    plain = filled(stock.RotatingKVCache(8), 11)
    save_prompt_cache(file, [arrays, both, plain, filled(PoolBackedKVCache(pool), 5)])
    before = pool.stats.blocks_in_use()
    again = load_prompt_cache(file, pool, 2)
    assert [type(cache).__name__ for cache in again] == [
        "ArraysCache",
        "CacheList",
        "RotatingKVCache",
        "PoolBackedKVCache",
    ]
    assert mx.array_equal(again[0][0], arrays[0]) and again[0][1] is None
    assert [type(cache) for cache in again[1].caches] == [stock.KVCache, PoolBackedKVCache]
    assert again[1][0].offset == 5 and again[1][0].keys.shape[2] == 5
    assert again[1][1].owner == 2  # inside a list, too
    assert filled(again[2], 1).offset == 12
    assert pool.stats.blocks_in_use() == before + 2 + 4
    check(pool, again)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_numbers_come_back_to_the_bit(tmp_path, dtype):
    pool, file = make_pool(), tmp_path / "prompt.safetensors"
    cache = filled(PoolBackedKVCache(pool), 7, dtype=dtype)
    save_prompt_cache(file, [cache, PoolBackedKVCache(pool)])
    again, empty = load_prompt_cache(file, pool, 2)
    assert again.keys.dtype == dtype and empty.empty()
    for mine, theirs in zip(again.keys_and_values(), cache.keys_and_values(), strict=True):
        assert mx.array_equal(mine, theirs)
    check(pool, [again, empty])


def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path, monkeypatch):
    pool, file = make_pool(), tmp_path / "prompt"  # no ending is added
    save_prompt_cache(file, [filled(PoolBackedKVCache(pool), 5)])
    assert [entry.name for entry in tmp_path.iterdir()] == ["prompt"]

    def half(path: str, *_: object) -> None:
        with open(path, "wb") as draft:
            draft.write(b"half a file")
        raise RuntimeError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "save_safetensors", half)
        with pytest.raises(OSError, match=r"\[save_prompt_cache\] cannot write .*no space left"):
            save_prompt_cache(file, [filled(PoolBackedKVCache(pool), 6)])
    assert [entry.name for entry in tmp_path.iterdir()] == ["prompt"]
    assert load_prompt_cache(file, pool, 2)[0].offset == 5
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        save_prompt_cache(tmp_path / "nowhere" / "prompt", [])
    with pytest.raises(FileNotFoundError):
        load_prompt_cache(tmp_path / "nothing", pool, 2)


def test_a_growth_step_is_chosen_anew(tmp_path):
    pool, file = make_pool(), tmp_path / "prompt"
    save_prompt_cache(file, [filled(PoolBackedKVCache(pool), 5)])
    (cache,) = load_prompt_cache(file, pool, 2, step=8)
    filled(cache, 1)
    assert cache.step == 8 and cache.keys.shape[2] == 5 + 8
    check(pool, [cache])


# --- field cases ----------------------------------------------------------------------------------


def test_field_H1_only_rows_with_tokens_are_saved(tmp_path):
    pool, file = make_pool(), tmp_path / "prompt"
    caches = [
        filled(PoolBackedKVCache(pool), 5),
        PoolBackedRotatingKVCache(pool, 512),
        filled(stock.KVCache(), 5),
    ]
    for _ in range(5):
        filled(caches[1], 1)
    assert [cache.keys.shape[2] for cache in caches] == [256, 256, 256]
    save_prompt_cache(file, caches)
    again = load_prompt_cache(file, pool, 2)
    assert [cache.offset for cache in again] == [5, 5, 5]
    assert [cache.keys.shape[2] for cache in again] == [5, 5, 5]
    assert len(pool.blocks_for(2)) == 2 * 2 * 2
    assert file.stat().st_size < 3000


def test_field_H2_a_cache_of_a_class_that_nobody_knows(tmp_path):
    class Exotic(stock.KVCache):
        pass

    file = tmp_path / "prompt"
    for unknown in (Exotic(), object(), None):
        name = type(unknown).__name__
        with pytest.raises(PromptCacheError, match=f"a {name} could not be loaded again"):
            save_prompt_cache(file, [unknown])
    assert not file.exists()


def test_field_H3_other_windows_shapes_and_types_are_refused(tmp_path):
    pool, file = make_pool(), tmp_path / "prompt"

    def refused(model, caches, message: str) -> None:
        save_prompt_cache(file, caches)
        before = books(pool)
        with pytest.raises(PromptCacheError, match=message):
            load_prompt_cache(file, pool, 2, model=model)
        assert books(pool) == before

    llama, gemma = tiny_llama(), tiny_gemma3()
    refused(llama, processed(gemma, pool), "kind of layer 0 is RotatingKVCache in the file")
    refused(tiny_gemma3(window=8), processed(gemma, pool), r"window of layer 0 is \(16, 0\)")
    short = [filled(PoolBackedKVCache(pool), 5, dims=16) for _ in range(3)]
    refused(llama, short, r"heads and dims of layer 0 is \(1, 16, 16\)")
    half = processed(llama, pool)
    for cache in half:
        cache.state = [array.astype(mx.float16) for array in cache.keys_and_values()]
    refused(llama, half, "type of layer 0 is float16 in the file, float32 in the model")


def test_field_H4_a_flipped_byte_is_refused(tmp_path):
    pool, file = make_pool(), tmp_path / "prompt"
    save_prompt_cache(file, [filled(PoolBackedKVCache(pool), 5)], {"rope_delta": -7})
    good = file.read_bytes()
    before = books(pool)
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 0x10
        file.write_bytes(bad)
        with pytest.raises(PromptCacheError):
            load_prompt_cache(file, pool, 2)
        assert books(pool) == before
    file.write_bytes(good)
    assert load_prompt_cache(file, pool, 2)[0].offset == 5
    pool.check_invariants()


def test_field_H8_another_owner(tmp_path):
    pool, file = make_pool(), tmp_path / "prompt"
    save_prompt_cache(file, [filled(PoolBackedKVCache(pool, owner=1), 5)])
    one, two = load_prompt_cache(file, pool, 2)[0], load_prompt_cache(file, pool, 3)[0]
    assert (one.owner, two.owner) == (2, 3)
    assert [len(pool.blocks_for(owner)) for owner in (2, 3)] == [4, 4]


def test_field_H9_metadata_comes_back(tmp_path):
    pool, file = make_pool(), tmp_path / "prompt"
    metadata = {"rope_delta": -7, "model": "tiny", "nested": {"a.b": [1, 2.5, None, True]}}
    save_prompt_cache(file, [filled(PoolBackedKVCache(pool), 5)], metadata)
    caches, again = load_prompt_cache(file, pool, 2, return_metadata=True)
    assert again == metadata and len(caches) == 1
    with pytest.raises(TypeError, match=r"\[save_prompt_cache\] metadata must be what JSON"):
        save_prompt_cache(file, caches, {"array": mx.array(1)})
    assert load_prompt_cache(file, pool, 3, return_metadata=True)[1] == metadata


@pytest.mark.parametrize("way", ["kvpool", "mlx-lm"])
@pytest.mark.parametrize("chunk", [1, 3])
def test_field_H11_a_ring_that_has_turned(tmp_path, chunk, way):
    pool, file = make_pool(), tmp_path / "prompt.safetensors"
    ring = PoolBackedRotatingKVCache(pool, 8, keep=2)
    for n_tokens in (6, 1, 1, 1, 1, 1):
        filled(ring, n_tokens)
    if way == "kvpool":
        save_prompt_cache(file, [ring])
        (again,) = load_prompt_cache(file, pool, 2)
    else:
        stock.save_prompt_cache(str(file), [ring])
        (again,) = stock.load_prompt_cache(str(file))
        again.attach(pool, 2)
    assert (again.max_size, again.keep, again.offset, again._idx) == (8, 2, 11, 5)
    for _ in range(4):
        new = new_tokens(chunk)
        for mine, theirs in zip(
            again.update_and_fetch(new, new), ring.update_and_fetch(new, new), strict=True
        ):
            assert mx.array_equal(mine, theirs)
    check(pool, [ring, again])


# --- where it does not fit, and files that lie ----------------------------------------------------


def test_arguments_are_checked_before_the_file(tmp_path):
    file = tmp_path / "nothing"
    with pytest.raises(TypeError, match=r"\[load_prompt_cache\] pool must be"):
        load_prompt_cache(file, None, 1)
    with pytest.raises(TypeError, match=r"\[load_prompt_cache\] owner must be an int, got None"):
        load_prompt_cache(file, make_pool(), None)
    with pytest.raises(ValueError, match=r"\[load_prompt_cache\] step must be >= 1, got 0"):
        load_prompt_cache(file, make_pool(), 1, step=0)


def test_files_of_others_are_refused(tmp_path):
    pool, file = make_pool(), tmp_path / "prompt.safetensors"
    cache = filled(PoolBackedKVCache(pool), 5)
    stock.save_prompt_cache(str(file), [cache])
    with pytest.raises(PromptCacheError, match="was not saved by kvpool"):
        load_prompt_cache(file, pool, 2)
    for content in (b"", b"{}", bytes(8), b"\xff" * 64, struct.pack("<Q", 2**62) + b"{}"):
        file.write_bytes(content)
        with pytest.raises(PromptCacheError, match="is damaged or no safetensors file"):
            load_prompt_cache(file, pool, 2)
    with pytest.raises(OSError):
        load_prompt_cache(tmp_path, pool, 2)


def test_truncated_and_garbled_files_give_typed_errors(tmp_path):
    model, pool, file = tiny_gemma3(), make_pool(), tmp_path / "prompt"
    save_prompt_cache(file, processed(model, pool))
    good, drawn = file.read_bytes(), random.Random(5)
    before = books(pool)
    header = 8 + struct.unpack("<Q", good[:8])[0]
    for _ in range(300):
        bad = bytearray(good)
        kind = drawn.randrange(4)
        if kind == 0:
            del bad[drawn.randrange(len(bad)) :]
        elif kind == 1:
            for _ in range(drawn.randrange(1, 9)):
                bad[drawn.randrange(header)] = drawn.randrange(256)
        elif kind == 2:
            start = drawn.randrange(len(bad))
            bad[start : start + 40] = drawn.randbytes(drawn.randrange(80))
        else:
            digit = drawn.choice([i for i in range(8, header) if chr(bad[i]).isdigit()])
            bad[digit] = ord(str((bad[digit] + 1) % 10))
        if bytes(bad) == good:
            continue
        file.write_bytes(bad)
        with pytest.raises(PromptCacheError):
            load_prompt_cache(file, pool, 2)
        assert books(pool) == before
    pool.check_invariants()


def forged(file, change) -> None:
    """Rewrites the record of a file, with a checksum that fits."""
    data = file.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    record = json.loads(header["__metadata__"]["kvpool"])
    change(record)
    text = json.dumps(record)
    header["__metadata__"] = {"kvpool": text, "kvpool.checksum": _digest(text.encode())}
    head = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + data[end:])


FORGERIES = {
    "an unknown version": lambda r: r.update(version=99),
    "no caches": lambda r: r.pop("caches"),
    "no list of caches": lambda r: r.update(caches=7),
    "no class": lambda r: r["caches"][0].pop("class"),
    "a class that is none of caches": lambda r: r["caches"][0].update({"class": "LRUPromptCache"}),
    "a function for a class": lambda r: r["caches"][0].update({"class": "make_prompt_cache"}),
    "a module for a class": lambda r: r["caches"][0].update({"class": "mx"}),
    "a number for a class": lambda r: r["caches"][0].update({"class": 3}),
    "no state": lambda r: r["caches"][0].update(state=None),
    "a state of words": lambda r: r["caches"][0].update(state=["keys", "values", 5]),
    "an array that is not there": lambda r: r["caches"][0].update(state={"array": "9"}),
    "two kinds at once": lambda r: r["caches"][0].update(state={"array": "0", "tuple": []}),
    "too long an offset": lambda r: r["caches"][0]["state"]["tuple"].__setitem__(2, 6),
    "a negative offset": lambda r: r["caches"][0]["state"]["tuple"].__setitem__(2, -1),
    "keys alone": lambda r: r["caches"][0]["state"]["tuple"].__setitem__(1, None),
    "another class for the state": lambda r: r["caches"][0].update(
        {"class": "PoolBackedRotatingKVCache"}
    ),
    "a quantised class": lambda r: r["caches"][0].update({"class": "PoolBackedQuantizedKVCache"}),
    "a list in a list": lambda r: r["caches"][0].update({"class": "CacheList"}),
    "other arrays": lambda r: r["arrays"].pop("0"),
    "no arrays": lambda r: r.update(arrays=None),
    "blocks of words": lambda r: r.update(block_size="four"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_records_that_lie_give_typed_errors(tmp_path, name):
    pool, file = make_pool(), tmp_path / "prompt"
    save_prompt_cache(file, [filled(PoolBackedKVCache(pool), 5)])
    forged(file, lambda record: None)
    assert load_prompt_cache(file, pool, 2)[0].offset == 5
    before = books(pool)
    forged(file, FORGERIES[name])
    with pytest.raises(PromptCacheError, match=r"^\[load_prompt_cache\] "):
        load_prompt_cache(file, pool, 2)
    assert books(pool) == before
    pool.check_invariants()
