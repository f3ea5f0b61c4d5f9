"""A tiny model in a folder, so that the command runs without a download."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from kvpool.models.tokenizers import byte_level_bpe, write_tokenizer
from mlx.utils import tree_flatten
from mlx_lm.models import llama

_SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
_TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

N_LAYERS = 2


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with one token a byte, in a folder for ``mlx_lm.load``."""
    from tokenizers import pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
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
        "num_key_value_heads": 2,
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
    return folder


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def kvpool(tmp_path: Path) -> Run:
    """Runs the command in a process of its own, with an empty folder of models."""

    def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvpool", *map(str, arguments)],
            env={**os.environ, "KVPOOL_MODELS": str(tmp_path / "models"), **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
