"""A tiny model in a folder, so that the command runs without a download."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from kvpool.models.tokenizers import byte_level_bpe, write_tokenizer
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import pre_tokenizers

_SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
_TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Of dims that every device's kernels read.
N_LAYERS, N_KEY_HEADS, HEAD_DIM = 2, 2, 64


def write_tiny_model(folder: Path) -> None:
    """Writes a random two-layer Llama with one token a byte, for ``mlx_lm.load``."""
    tokens = _SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    types = [3] * len(_SPECIAL) + [1] * (len(tokens) - len(_SPECIAL))
    write_tokenizer(
        folder,
        byte_level_bpe(tokens, types, merges=[]),
        bos=_SPECIAL[0],
        eos=_SPECIAL[0],
        pad=_SPECIAL[0],
        unknown=_SPECIAL[0],
        max_tokens=4096,
        chat_template=_TEMPLATE,
    )
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": N_LAYERS,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": N_KEY_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(tokens),
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    mx.random.seed(11)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    # The end token never wins, so every run has as many tokens as it asks for.
    weights = dict(tree_flatten(model.parameters()))
    weights["lm_head.weight"] = weights["lm_head.weight"] * 8
    weights["lm_head.weight"][0] = 0
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
