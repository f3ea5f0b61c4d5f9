"""Finds, fetches and loads the model that a command names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvpool import models
from kvpool.cli.console import note
from kvpool.cli.errors import USAGE, CommandError
from kvpool.cli.model import fetch_with_progress

__all__ = ["encode", "load"]


def load(name: str, *, fp32: bool = False) -> tuple[Any, Any]:
    """The model and tokenizer of a known name, a folder or a hub id.

    Args:
        name: Which model; a known one is fetched if it is not there.
        fp32: Dequantise its weights and run it in fp32.

    Raises:
        CommandError: mlx-lm is not installed, there is no such model or it does not load.
    """
    # transformers advises on its own set-up while it is imported, which concerns nobody here.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import mlx_lm
    except ImportError as error:
        raise CommandError(
            f"this needs MLX and mlx-lm ({error}): pip install 'kvpool[cpu,mlx-lm]'"
        ) from error
    if name in models.KNOWN_MODELS:
        spec = models.spec_for(name)
        if not models.is_prepared(spec):
            note(f"{name} is not there yet; fetching it once")
            fetch_with_progress(name)
        source = str(models.model_path(spec))
    elif (name and Path(name).is_dir()) or name.count("/") == 1:
        source = name
    else:
        known = ", ".join(models.KNOWN_MODELS)
        raise CommandError(f"no folder and no model is called {name!r}; known: {known}", USAGE)
    try:
        model, tokenizer = mlx_lm.load(source)[:2]
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CommandError(f"cannot load {name}: {type(error).__name__}: {reason}") from error
    if fp32:
        _widen(model)
    return model, tokenizer


def _widen(model: Any) -> None:
    import mlx.core as mx
    from mlx_lm.utils import dequantize_model

    dequantize_model(model)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())


def encode(tokenizer: Any, text: str, *, raw: bool) -> list[int]:
    if tokenizer.chat_template is None or raw:
        tokens = tokenizer.encode(text)
    else:
        tokens = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        )
    if not tokens:
        raise CommandError("the prompt has no tokens", USAGE)
    return list(tokens)
