"""Random models of a few thousand weights, one for each kind of cache that mlx-lm asks for."""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from kvpool.models.tokenizers import byte_level_bpe, write_tokenizer
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.base import quantized_scaled_dot_product_attention

VOCABULARY = 97

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

#: What each of mlx-lm's architectures wants beside these sizes, or instead of them.
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3, "head_dim": 64},  # a group of stock quantisation
    # Keys and queries are normalised; a head is wider than its share of the hidden state.
    "qwen3": {
        "num_hidden_layers": 2,
        "head_dim": 24,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    },
    # Two sliding-window layers, then one that sees all.
    "gemma3_text": {
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 16,
    },
    # Sliding-window and full layers in turn, with attention sinks.
    "gpt_oss": {
        "num_hidden_layers": 4,
        "intermediate_size": 32,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "head_dim": 16,
        "sliding_window": 16,
        "rope_theta": 10000,
    },
    # Latent attention: one head, keys and values of unequal width.
    "deepseek_v3": {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": None,
        "n_routed_experts": None,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "first_k_dense_replace": 2,
        "rope_theta": 10000.0,
    },
    # Reads the offset of its first cache before it asks for a mask.
    "gpt2": {
        "n_ctx": 64,
        "n_embd": 32,
        "n_head": 2,
        "n_layer": 2,
        "n_positions": 64,
        "layer_norm_epsilon": 1e-5,
    },
    # Convolutions with a state of their own between two layers of attention.
    "lfm2": {
        "num_hidden_layers": 4,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 64,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
}


def described(architecture: str, **changes: Any) -> dict[str, Any]:
    """The config of a tiny model, with some values changed."""
    return {"model_type": architecture, **_SIZES, **_ARCHITECTURES[architecture], **changes}


def new_model(architecture: str, **changes: Any) -> Any:
    """A tiny model of one of mlx-lm's architectures, with whatever weights mlx-lm gives it."""
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    return module.Model(module.ModelArgs.from_dict(described(architecture, **changes)))


def _ready(architecture: str, seed: int, **changes: Any) -> Any:
    """A model with seeded fp32 weights, so large that a token depends on all before it."""
    mx.random.seed(seed)  # of the biases that mlx-lm draws
    model = new_model(architecture, **changes)
    mx.random.seed(seed)

    def drawn(weight: mx.array) -> mx.array:
        if weight.ndim < 2:  # norms stay as they are made, sinks and biases small
            return weight.astype(mx.float32)
        return mx.random.normal(weight.shape) * (2 * weight.shape[-1] ** -0.5)

    model.update(tree_map(drawn, model.parameters()))
    mx.eval(model.parameters())
    return model


@cache
def tiny_llama(n_layers: int = 3, seed: int = 1) -> Any:
    return _ready("llama", seed, num_hidden_layers=n_layers)


@cache
def tiny_qwen3() -> Any:
    return _ready("qwen3", 7)


@cache
def tiny_gemma3(window: int = 16) -> Any:
    return _ready("gemma3_text", 2, sliding_window=window)


@cache
def tiny_gpt_oss() -> Any:
    return _ready("gpt_oss", 3)


@cache
def tiny_deepseek_v3() -> Any:
    return _ready("deepseek_v3", 4)


@cache
def tiny_gpt2() -> Any:
    return _ready("gpt2", 6)


@cache
def tiny_lfm2() -> Any:
    return _ready("lfm2", 8)


@cache
def _attends_quantised() -> bool:
    """Whether mlx-lm's attention over 8-bit keys of tiny_llama runs, for a prompt and a token."""
    codes = mx.quantize(mx.ones((1, 2, 21, 64)), group_size=64, bits=8)
    try:
        for n_queries in (21, 1):
            queries = mx.ones((1, 4, n_queries, 64))
            mask = "causal" if n_queries > 1 else None
            mx.eval(quantized_scaled_dot_product_attention(queries, codes, codes, 1.0, mask))
    except (RuntimeError, ValueError):
        return False
    return True


def needs_quantised_attention() -> None:
    """Skips where MLX cannot attend over quantised keys of tiny_llama, as on CUDA (0.32.4)."""
    if not _attends_quantised():
        pytest.skip("MLX has no quantised matrix product for a head of 64 numbers on this device")


def all_models() -> dict[str, Any]:
    return {
        "llama": tiny_llama,
        "gemma3": tiny_gemma3,
        "gpt_oss": tiny_gpt_oss,
        "deepseek_v3": tiny_deepseek_v3,
    }


def write_llama(folder: Path) -> Path:
    """A random Llama with one token a byte, in a folder for ``mlx_lm.load``. It never ends."""
    from tokenizers import pre_tokenizers

    end = "<|end|>"
    tokens = [end, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    write_tokenizer(
        folder,
        byte_level_bpe(tokens, [3] + [1] * (len(tokens) - 1), merges=[]),
        bos=end,
        eos=end,
        pad=end,
        unknown=end,
        max_tokens=4096,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )
    sizes = {"num_hidden_layers": 2, "head_dim": 8, "vocab_size": len(tokens)}
    model = _ready("llama", 6, **sizes)
    weights = dict(tree_flatten(model.parameters()))
    weights["lm_head.weight"][0] = 0  # the end never wins
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(described("llama", eos_token_id=0, **sizes)))
    return folder
