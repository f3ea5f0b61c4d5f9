"""SmolLM2-135M-Instruct from its Q4_1 GGUF, whose blocks are MLX's quantised arrays as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvpool.models.errors import ModelError
from kvpool.models.tokenizers import byte_level_bpe, write_tokenizer

__all__ = ["convert_smollm2"]

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_smollm2(gguf: Path, folder: Path) -> None:
    """Writes a folder for `mlx_lm.load`: weights in 4 bits (embedding in 8), activations in fp32.

    Q4_1 is affine 4-bit in groups of 32 and Q8_0 the same in 8 bits, so no weight changes. The
    scales become fp32, exactly: fp16 ones would be widened again at every step.
    """
    import mlx.core as mx

    loaded: Any = mx.load(str(gguf), format="gguf", return_metadata=True)
    arrays, metadata = loaded
    weights = {
        _mlx_name(name): array if array.dtype == mx.uint32 else array.astype(mx.float32)
        for name, array in arrays.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(_config(metadata), indent=2) + "\n")

    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"].tolist()
    write_tokenizer(
        folder,
        byte_level_bpe(tokens, types, metadata["tokenizer.ggml.merges"]),
        bos=tokens[metadata["tokenizer.ggml.bos_token_id"].item()],
        eos=tokens[metadata["tokenizer.ggml.eos_token_id"].item()],
        pad=tokens[metadata["tokenizer.ggml.padding_token_id"].item()],
        unknown=tokens[metadata["tokenizer.ggml.unknown_token_id"].item()],
        max_tokens=metadata["llama.context_length"].item(),
        chat_template=metadata["tokenizer.chat_template"],
    )


def _mlx_name(name: str) -> str:
    """`blk.3.attn_q.scales` becomes `model.layers.3.self_attn.q_proj.scales`."""
    match name.split("."):
        case ["token_embd", part]:
            return f"model.embed_tokens.{part}"
        case ["output_norm", part]:
            return f"model.norm.{part}"
        case ["blk", layer, module, part] if module in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[module]}.{part}"
    raise ModelError(f"the GGUF file has a tensor that Llama does not: {name}")


def _config(metadata: dict[str, Any]) -> dict[str, object]:
    def value(key: str) -> Any:
        return metadata[key].item()

    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": value("llama.embedding_length"),
        "num_hidden_layers": value("llama.block_count"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_attention_heads": value("llama.attention.head_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "head_dim": value("llama.rope.dimension_count"),
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "vocab_size": value("llama.vocab_size"),
        "max_position_embeddings": value("llama.context_length"),
        "rope_theta": value("llama.rope.freq_base"),
        # GGUF permutes the rows of Q and K so that each rotated pair lies side by side.
        "rope_traditional": True,
        "tie_word_embeddings": True,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "quantization": {
            "group_size": 32,
            "bits": 4,
            "model.embed_tokens": {"group_size": 32, "bits": 8},
        },
    }
