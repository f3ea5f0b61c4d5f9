"""Beam search: the beams share the blocks of what they have in common.

    python examples/python/beam_search.py MODEL [PROMPT] [--beams 3]

MODEL is whatever ``mlx_lm.load`` takes: a folder or the name of a model on a hub.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from typing import Any

import kvpool
import mlx.core as mx
import mlx_lm


@dataclass
class Beam:
    """A sequence so far: the last token is not in the caches yet."""

    tokens: list[int]
    score: float  # sum of log probabilities
    caches: list[Any]


def extend(model: Any, beams: list[Beam], width: int) -> list[Beam]:
    """The ``width`` best sequences that are one token longer."""
    candidates = []
    for beam in beams:
        logits = model(mx.array([beam.tokens[-1:]]), cache=beam.caches)[0, -1].astype(mx.float32)
        scores = beam.score + logits - mx.logsumexp(logits)
        best = mx.argpartition(-scores, width)[:width]
        candidates += [
            (score, token, beam)
            for score, token in zip(scores[best].tolist(), best.tolist(), strict=True)
        ]
    candidates.sort(key=lambda candidate: -candidate[0])
    # A fork takes no block and copies none: the first token that one side adds does.
    return [
        Beam([*beam.tokens, token], score, copy.deepcopy(beam.caches))
        for score, token, beam in candidates[:width]
    ]  # what the beams of before held alone goes back as they are dropped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--beams", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=12)
    options = parser.parse_args()

    model, tokenizer = mlx_lm.load(options.model)
    prompt = tokenizer.encode(options.prompt)
    longest = len(prompt) + options.max_tokens
    config = kvpool.PoolConfig.for_model(model, max_tokens=longest, n_sequences=2 * options.beams)
    pool = kvpool.BlockPoolAllocator(config)
    caches = kvpool.build_paged_caches(model, pool, owner=pool.new_owner())

    with kvpool.attention():
        if len(prompt) > 1:
            model(mx.array([prompt[:-1]]), cache=caches)
        beams = [Beam(list(prompt), 0.0, caches)]
        del caches
        for _ in range(options.max_tokens):
            beams = extend(model, beams, options.beams)

    for beam in beams:
        print(f"{beam.score:8.3f}  {tokenizer.decode(beam.tokens[len(prompt) :])}")
    alone = sum(cache.n_blocks_held() for beam in beams for cache in beam.caches)
    print(f"{pool.stats.blocks_in_use()} blocks; {alone} if no beam shared any")


if __name__ == "__main__":
    main()
