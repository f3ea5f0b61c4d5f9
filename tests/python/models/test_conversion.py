"""Converted models compute what the original weights compute.

A tiny GGUF is written from random weights, and the converted model's logits are held against those
of a model that mlx-lm builds from the same weights, dequantised and in their original layout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from kvpool.models import ModelError
from kvpool.models.gemma3 import convert_gemma3
from kvpool.models.smollm2 import convert_smollm2
from tiny_models import new_model

TEXT = "the cat sat"

# A block of GGUF's formats is 32 numbers.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


class Writer:
    """Writes a GGUF file, and remembers each tensor as a reader would dequantise it."""

    def __init__(self, path: Path, architecture: str) -> None:
        self._writer = gguf.GGUFWriter(path, architecture)
        self._rng = np.random.default_rng(3)
        self.weights: dict[str, np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def norm(self, name: str, size: int) -> None:
        self._add(name, 1 + self._rng.standard_normal(size) / 4, Quant.F32)

    def matrix(self, name: str, rows: int, columns: int, quant: Quant) -> None:
        values = self._rng.standard_normal((rows, columns)) * (2 * columns**-0.5)
        self._add(name, values, quant)

    def _add(self, name: str, values: np.ndarray, quant: Quant) -> None:
        values = values.astype(np.float32)
        data = values if quant == Quant.F32 else gguf.quants.quantize(values, quant)
        self._writer.add_tensor(name, data, raw_dtype=quant)
        self.weights[name] = values if quant == Quant.F32 else gguf.quants.dequantize(data, quant)

    def close(self) -> None:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()


def llama_file(path: Path, another_tensor: str | None = None) -> dict[str, np.ndarray]:
    from tokenizers import pre_tokenizers

    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "the"]
    out = Writer(path, "llama")
    out.add_block_count(2)
    out.add_context_length(512)
    out.add_embedding_length(64)
    out.add_feed_forward_length(96)
    out.add_head_count(4)
    out.add_head_count_kv(2)
    out.add_rope_dimension_count(32)
    out.add_rope_freq_base(10000.0)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("gpt2")
    out.add_token_list(tokens)
    out.add_token_types([3] + [1] * (len(tokens) - 1))
    out.add_token_merges(["h e", "t he"])
    for kind in ("bos", "eos", "pad", "unk"):
        getattr(out, f"add_{kind}_token_id")(0)
    out.add_chat_template("{{ messages[0]['content'] }}")
    out.matrix("token_embd.weight", len(tokens), 64, Quant.Q8_0)
    out.norm("output_norm.weight", 64)
    for layer in range(2):
        block = f"blk.{layer}."
        out.norm(f"{block}attn_norm.weight", 64)
        out.norm(f"{block}ffn_norm.weight", 64)
        for name, rows, columns in (
            ("attn_q", 128, 64),
            ("attn_k", 64, 64),
            ("attn_v", 64, 64),
            ("attn_output", 64, 128),
            ("ffn_gate", 96, 64),
            ("ffn_up", 96, 64),
            ("ffn_down", 64, 96),
        ):
            out.matrix(f"{block}{name}.weight", rows, columns, Quant.Q4_1)
    if another_tensor:
        out.norm(another_tensor, 32)
    out.close()
    return out.weights


def rows_as_in_the_original(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Undoes GGUF's order, where the two rows of a rotated pair lie side by side."""
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def original_llama(weights: dict[str, np.ndarray]) -> Any:
    """Llama with dense weights, rows in the order of the original and rotated by halves."""
    model = new_model(
        "llama",
        **SIZES,
        num_hidden_layers=2,
        vocab_size=len(weights["token_embd.weight"]),
        tie_word_embeddings=True,
    )
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    own = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
    }
    for layer in range(2):
        for theirs, ours in names.items():
            weight = weights[f"blk.{layer}.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):
                weight = rows_as_in_the_original(weight, 32)
            own[f"model.layers.{layer}.{ours}.weight"] = weight
    model.load_weights([(name, mx.array(weight)) for name, weight in own.items()])
    return model


def gemma_file(path: Path) -> dict[str, np.ndarray]:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "\u2581", *"abcehst", "th", "the"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    out = Writer(path, "gemma3")
    out.add_block_count(7)
    out.add_context_length(512)
    out.add_embedding_length(64)
    out.add_feed_forward_length(96)
    out.add_head_count(2)
    out.add_head_count_kv(1)
    out.add_key_length(32)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_freq_base(1e6)
    out.add_sliding_window(8)
    out.add_tokenizer_model("llama")
    out.add_token_list(tokens)
    out.add_token_types([3] * 4 + [1] * 10 + [6] * 256)
    out.add_token_scores([-1000.0] * 4 + [-float(rank) for rank in range(266)])
    for token, kind in enumerate(("pad", "eos", "bos", "unk")):
        getattr(out, f"add_{kind}_token_id")(token)
    out.matrix("token_embd.weight", len(tokens), 64, Quant.Q8_0)
    out.norm("output_norm.weight", 64)
    for layer in range(7):
        block = f"blk.{layer}."
        norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        for name in norms:
            out.norm(f"{block}{name}.weight", 64)
        for name in ("attn_q_norm", "attn_k_norm"):
            out.norm(f"{block}{name}.weight", 32)
        for name, rows, columns, quant in (
            ("attn_q", 64, 64, Quant.Q5_0),
            ("attn_k", 32, 64, Quant.Q5_0),
            ("attn_v", 32, 64, Quant.Q8_0),
            ("attn_output", 64, 64, Quant.Q4_1),
            ("ffn_gate", 96, 64, Quant.Q5_0),
            ("ffn_up", 96, 64, Quant.Q5_0),
            ("ffn_down", 64, 96, Quant.Q8_0),
        ):
            out.matrix(f"{block}{name}.weight", rows, columns, quant)
    out.close()
    return out.weights


def original_gemma(weights: dict[str, np.ndarray]) -> Any:
    model = new_model(
        "gemma3_text",
        **SIZES,
        num_hidden_layers=7,
        num_attention_heads=2,
        num_key_value_heads=1,
        query_pre_attn_scalar=32,
        sliding_window=8,
        sliding_window_pattern=6,
        vocab_size=len(weights["token_embd.weight"]),
    )
    names = {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    own = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"] - 1,
    }
    for layer in range(7):
        for theirs, ours in names.items():
            weight = weights[f"blk.{layer}.{theirs}.weight"]
            own[f"model.layers.{layer}.{ours}.weight"] = weight - 1 if weight.ndim == 1 else weight
    own = model.sanitize(own)
    model.load_weights([(name, mx.array(weight)) for name, weight in own.items()])
    return model


def relative_error(found: mx.array, expected: mx.array) -> float:
    return float(mx.abs(found - expected).max() / mx.abs(expected).max())


def test_smollm2_keeps_every_weight(tmp_path):
    weights = llama_file(tmp_path / "model.gguf")
    (tmp_path / "model").mkdir()
    convert_smollm2(tmp_path / "model.gguf", tmp_path / "model")
    model, tokenizer = mlx_lm.load(str(tmp_path / "model"))[:2]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": TEXT}])
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) == len(TEXT) - 2  # "the" is one token
    inputs = mx.array([ids])
    logits = model(inputs)
    assert logits.dtype == mx.float32
    assert relative_error(logits, original_llama(weights)(inputs)) < 1e-4


def test_gemma3_is_within_the_error_of_8_bits(tmp_path):
    weights = gemma_file(tmp_path / "model.gguf")
    (tmp_path / "model").mkdir()
    convert_gemma3(tmp_path / "model.gguf", tmp_path / "model")
    model, tokenizer = mlx_lm.load(str(tmp_path / "model"))[:2]
    ids = tokenizer.encode(TEXT * 3)  # past the window of 8
    assert ids[:2] == [2, 13]  # <bos>, then "the"
    assert tokenizer.decode(ids[1:]) == TEXT * 3
    inputs = mx.array([ids])
    logits = model(inputs)
    assert logits.dtype == mx.float32
    assert relative_error(logits, original_gemma(weights)(inputs)) < 0.05


def test_a_tensor_of_another_architecture_is_refused(tmp_path):
    llama_file(tmp_path / "model.gguf", another_tensor="blk.0.ssm_in.weight")
    with pytest.raises(ModelError, match=r"tensor that Llama does not: blk\.0\.ssm_in\.weight"):
        convert_smollm2(tmp_path / "model.gguf", tmp_path)


def test_the_config_is_what_the_file_says(tmp_path):
    gemma_file(tmp_path / "model.gguf")
    convert_gemma3(tmp_path / "model.gguf", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["sliding_window"] == 8
    assert config["sliding_window_pattern"] == 6
    assert config["num_hidden_layers"] == 7
    assert config["rope_local_base_freq"] == 10000.0
