"""Gemma 3 270M from a Q4_K_M GGUF, whose K-quants MLX cannot hold: dequantised, then 8 bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpool.models.errors import ModelError
from kvpool.models.tokenizers import sentencepiece_bpe, write_tokenizer

__all__ = ["convert_gemma3"]

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}

# Of the architecture, not in the file: every sixth layer sees the whole context, and the others
# rotate with their own base.
_SLIDING_WINDOW_PATTERN = 6
_LOCAL_ROPE_BASE = 10_000.0

# For the embedding and every projection. Against the dequantised weights: at most 0.2 % of the
# largest weight, a fifth of the error that the file's own 4 to 8 bits carry.
_GROUP_SIZE = 32
_BITS = 8


def convert_gemma3(gguf: Path, folder: Path) -> None:
    """Writes a folder for `mlx_lm.load`: weights in 8 bits, activations in fp32."""
    import mlx.core as mx
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    weights: dict[str, mx.array] = {}
    for tensor in reader.tensors:
        weights.update(_mlx_arrays(_mlx_name(tensor.name), tensor))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    (folder / "config.json").write_text(json.dumps(_config(value), indent=2) + "\n")
    tokens = value("tokenizer.ggml.tokens")
    bos, eos, pad, unknown = (
        tokens[value(f"tokenizer.ggml.{kind}_token_id")]
        for kind in ("bos", "eos", "padding", "unknown")
    )
    tokenizer = sentencepiece_bpe(
        tokens,
        value("tokenizer.ggml.token_type"),
        value("tokenizer.ggml.scores"),
        unknown=unknown,
        bos=bos,
    )
    write_tokenizer(
        folder,
        tokenizer,
        bos=bos,
        eos=eos,
        pad=pad,
        unknown=unknown,
        max_tokens=value("gemma3.context_length"),
        chat_template=None,  # the base model has none
    )


def _mlx_name(name: str) -> str:
    """`blk.3.attn_q.weight` becomes `model.layers.3.self_attn.q_proj`."""
    match name.split("."):
        case ["token_embd", "weight"]:
            return "model.embed_tokens"
        case ["output_norm", "weight"]:
            return "model.norm"
        case ["blk", layer, module, "weight"] if module in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[module]}"
    raise ModelError(f"the GGUF file has a tensor that Gemma 3 does not: {name}")


def _mlx_arrays(module: str, tensor: Any) -> dict[str, Any]:
    import mlx.core as mx
    import numpy as np
    from gguf import dequantize

    weight = mx.array(dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    if weight.ndim == 1:
        # GGUF stores the factor of the norm, mlx-lm's Gemma what it adds to one.
        return {f"{module}.weight": weight - 1}
    packed, scales, biases = mx.quantize(weight, group_size=_GROUP_SIZE, bits=_BITS)
    mx.eval(packed, scales, biases)  # so that one dequantised tensor is alive at a time
    return {f"{module}.weight": packed, f"{module}.scales": scales, f"{module}.biases": biases}


def _config(value: Callable[[str], Any]) -> dict[str, object]:
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": value("gemma3.embedding_length"),
        "num_hidden_layers": value("gemma3.block_count"),
        "intermediate_size": value("gemma3.feed_forward_length"),
        "num_attention_heads": value("gemma3.attention.head_count"),
        "num_key_value_heads": value("gemma3.attention.head_count_kv"),
        "head_dim": value("gemma3.attention.key_length"),
        "query_pre_attn_scalar": value("gemma3.attention.key_length"),
        "rms_norm_eps": value("gemma3.attention.layer_norm_rms_epsilon"),
        "vocab_size": len(value("tokenizer.ggml.tokens")),
        "max_position_embeddings": value("gemma3.context_length"),
        "rope_theta": value("gemma3.rope.freq_base"),
        "rope_local_base_freq": _LOCAL_ROPE_BASE,
        "sliding_window": value("gemma3.attention.sliding_window"),
        "sliding_window_pattern": _SLIDING_WINDOW_PATTERN,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "quantization": {"group_size": _GROUP_SIZE, "bits": _BITS},
    }
