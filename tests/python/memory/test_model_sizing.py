"""PoolConfig.for_model: the pool for a model, by bytes or by tokens."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kvpool.memory import BlockPoolAllocator, PoolConfig
from kvpool.memory._model_sizing import parse_memory


class KVCache:
    """Named as mlx-lm's."""


class RotatingKVCache:
    def __init__(self, max_size: int) -> None:
        self.max_size = max_size


class ArraysCache:
    """A recurrent layer's."""


def fake_model(caches: list | None = None, layers: int = 28, **args: object) -> SimpleNamespace:
    described = {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, **args}
    model = SimpleNamespace(args=SimpleNamespace(**described), layers=[object()] * layers)
    if caches is not None:
        model.make_cache = lambda: caches
    return model


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512MB", 512 * 10**6),
        ("4GB", 4 * 10**9),
        ("4GiB", 4 * 2**30),
        ("1.5 kib", 1536),
        ("2T", 2 * 10**12),
        ("100", 100),
        ("7B", 7),
        (12, 12),
    ],
)
def test_memory_by_words(text: str | int, expected: int) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("wrong", ["", "GB", "4 gigs", "-1GB", "0"])
def test_memory_that_is_no_amount(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"^\[PoolConfig::for_model\] memory must be"):
        parse_memory(wrong)


def test_by_tokens_counts_every_layer_both_streams() -> None:
    config = PoolConfig.for_model(fake_model(), max_tokens=1024, block_size=16)
    assert config.n_blocks == 2 * 28 * 64
    assert config.tokens_for(28) == 1024
    sizing = config.sizing
    assert sizing.bytes_per_token == 28 * 2 * 8 * 128 * 2
    assert sizing.n_bytes == 1024 * sizing.bytes_per_token
    assert str(sizing) == (
        "3,584 blocks of 16 tokens hold 1 sequence of 1,024 tokens in 28 layers: "
        "117,440,512 bytes, 114,688 a token"
    )


def test_by_memory_is_the_most_that_fits() -> None:
    config = PoolConfig.for_model(fake_model(), memory="4GB")
    sizing = config.sizing
    assert sizing.n_bytes <= 4 * 10**9 < sizing.n_bytes + 16 * sizing.bytes_per_token
    assert sizing.tokens_per_sequence == config.tokens_for(28) == 34_864
    again = PoolConfig.for_model(fake_model(), max_tokens=34_864)
    assert again == config


def test_sequences_share_the_memory() -> None:
    one = PoolConfig.for_model(fake_model(), memory="1GiB")
    four = PoolConfig.for_model(fake_model(), memory="1GiB", n_sequences=4)
    assert one.sizing.tokens_per_sequence // 4 - 16 < four.sizing.tokens_per_sequence
    assert four.sizing.n_bytes <= 2**30
    assert "4 sequences" in str(four.sizing)


def test_windows_take_their_window_and_other_layers_nothing() -> None:
    caches = [RotatingKVCache(512), KVCache(), ArraysCache(), RotatingKVCache(512)]
    config = PoolConfig.for_model(fake_model(caches), max_tokens=8192, prefill_step=256)
    window_blocks = -(-(512 + 256 - 1) // 16)
    assert config.n_blocks == 2 * (8192 // 16 + 2 * window_blocks)
    assert "3 layers (2 with a window)" in str(config.sizing)
    short = PoolConfig.for_model(fake_model(caches), max_tokens=100)
    assert short.n_blocks == 2 * 3 * 7


def test_windows_alone_hold_any_length() -> None:
    config = PoolConfig.for_model(fake_model([RotatingKVCache(64)] * 2), memory="1GB")
    assert config.sizing.tokens_per_sequence is None
    assert config.n_blocks == 2 * 2 * -(-(64 + 2048 - 1) // 16)
    assert "any number of tokens" in str(config.sizing)


def test_head_dim_from_the_hidden_size() -> None:
    model = fake_model(num_key_value_heads=None, head_dim=None, hidden_size=768)
    model.args.num_attention_heads = 12
    assert PoolConfig.for_model(model, max_tokens=16).sizing.bytes_per_token == 28 * 2 * 768 * 2


def test_sizes_in_a_nested_dictionary_and_another_type() -> None:
    text = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}
    model = SimpleNamespace(
        config={"text_config": text, "torch_dtype": "float32"},
        model=SimpleNamespace(layers=[0] * 2),
    )
    assert PoolConfig.for_model(model, max_tokens=1).sizing.bytes_per_token == 2 * 2 * 32 * 4


def test_options_reach_the_config() -> None:
    config = PoolConfig.for_model(
        fake_model(layers=1),
        max_tokens=10,
        block_size=4,
        separate_kv=False,
        grow_on_exhaustion=True,
        max_blocks=99,
    )
    assert config == PoolConfig(4, 6, False, True, 99)
    BlockPoolAllocator(config)
    assert pickle.loads(pickle.dumps(config)).sizing == config.sizing
    assert replace(config).sizing is None and PoolConfig().sizing is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "memory or max_tokens"),
        ({"memory": "1GB", "max_tokens": 5}, TypeError, "memory or max_tokens"),
        ({"memory": 1.5}, TypeError, "memory must be an int, got 1.5"),
        ({"memory": "1kB"}, ValueError, "memory='1kB' is too little: .* takes 1,835,008 bytes"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be >= 1, got 0"),
        ({"max_tokens": True}, TypeError, "max_tokens must be an int, got True"),
        ({"max_tokens": 5, "n_sequences": 0}, ValueError, "n_sequences must be >= 1"),
        ({"max_tokens": 5, "block_size": 0}, ValueError, "block_size must be >= 1"),
    ],
)
def test_arguments_that_make_no_pool(arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=rf"^\[PoolConfig::for_model\] .*{message}"):
        PoolConfig.for_model(fake_model(), **arguments)


def test_models_that_tell_too_little() -> None:
    with pytest.raises(ValueError, match="has no layer to pool"):
        PoolConfig.for_model(fake_model([ArraysCache()]), max_tokens=1)
    with pytest.raises(ValueError, match="neither make_cache nor layers"):
        PoolConfig.for_model(SimpleNamespace(args=None), max_tokens=1)
    with pytest.raises(ValueError, match="neither num_key_value_heads nor head_dim"):
        PoolConfig.for_model(SimpleNamespace(layers=[1]), max_tokens=1)


@pytest.fixture
def new_model() -> Callable[..., Any]:
    """Makes a tiny model; skips where there is no mlx-lm."""
    pytest.importorskip("mlx_lm")
    from tiny_models import new_model

    return new_model


def test_mlx_models_are_asked_for_one_token(new_model: Callable[..., Any]) -> None:
    import mlx.core as mx

    model = new_model("llama", num_hidden_layers=3, num_key_value_heads=2, head_dim=16)
    assert PoolConfig.for_model(model, max_tokens=16).sizing.bytes_per_token == 3 * 2 * 2 * 16 * 4
    model.set_dtype(mx.bfloat16)
    assert PoolConfig.for_model(model, max_tokens=16).sizing.bytes_per_token == 3 * 2 * 2 * 16 * 2


def test_latent_attention_is_measured_not_guessed(new_model: Callable[..., Any]) -> None:
    model = new_model("deepseek_v3", num_hidden_layers=1, kv_lora_rank=32, qk_rope_head_dim=16)
    config = PoolConfig.for_model(model, max_tokens=16)
    assert config.sizing.bytes_per_token == (32 + 16) * 4
