"""Builds fast tokenizers from the token lists of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["byte_level_bpe", "sentencepiece_bpe", "write_tokenizer"]

# Token types of the GGUF format.
_CONTROL = 3
_USER_DEFINED = 4


def byte_level_bpe(tokens: Sequence[str], types: Sequence[int], merges: Sequence[str]) -> Any:
    """A GPT-2 style tokenizer that splits digits singly, as SmolLM's does.

    Args:
        tokens: Every token, in order of id, in GPT-2's printable alphabet of bytes.
        types: The GGUF type of each token.
        merges: `left right` pairs, best first.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [_pair(merge) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, tokens, types)
    return tokenizer


def sentencepiece_bpe(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], unknown: str, bos: str
) -> Any:
    """A SentencePiece BPE tokenizer with byte fall-back and no space before the text.

    SentencePiece has no list of merges: it joins the neighbours whose union has the best score.
    The list is every way to split a token into two others, ordered by the union's score.

    Args:
        tokens: Every token, in order of id, with U+2581 for a space.
        types: The GGUF type of each token.
        scores: The score of each token; higher is joined earlier.
        unknown: The token of what cannot be encoded.
        bos: The token put before a text when special tokens are asked for.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges_by_score(tokens, types, scores, vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _add_special(tokenizer, tokens, types)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
    )
    return tokenizer


def write_tokenizer(
    folder: Path,
    tokenizer: Any,
    *,
    bos: str,
    eos: str,
    pad: str,
    unknown: str,
    max_tokens: int,
    chat_template: str | None,
) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": unknown,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _merges_by_score(
    tokens: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float],
    vocabulary: dict[str, int],
) -> list[tuple[str, str]]:
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == 1}
    ranked: list[tuple[float, int, str, str]] = []
    for token in normal:
        rank = -scores[vocabulary[token]]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((rank, cut, left, right))
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]


def _add_special(tokenizer: Any, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control tokens and user-defined ones are matched in the text before anything else."""
    from tokenizers import AddedToken

    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
