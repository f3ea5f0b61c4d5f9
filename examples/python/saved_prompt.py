"""A long prompt is processed once, saved to a file, and loaded for each question about it.

    python examples/python/saved_prompt.py MODEL [QUESTION ...] [--file prompt.safetensors]

MODEL is whatever ``mlx_lm.load`` takes: a folder or the name of a model on a hub.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
import mlx_lm
from kvpool import (
    BlockPoolAllocator,
    PoolConfig,
    build_pooled_caches,
    load_prompt_cache,
    save_prompt_cache,
)

TEXT = (
    "A block pool hands out blocks of token slots to requests. A block belongs to one owner, or to "
    "more that share it, and goes back to its free list with the last of them.\n"
)
QUESTIONS = ["Who gives a block back?", "What is a block made of?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--file", type=Path, default=Path("prompt.safetensors"))
    parser.add_argument("--max-tokens", type=int, default=40)
    options = parser.parse_args()

    model, tokenizer = mlx_lm.load(options.model)
    pool = BlockPoolAllocator(PoolConfig.for_model(model, max_tokens=1024))

    text = tokenizer.encode(TEXT)
    caches = build_pooled_caches(model, pool, owner=1)
    model(mx.array([text]), cache=caches)
    save_prompt_cache(options.file, caches, metadata={"tokens": len(text)})
    caches[0].release()
    print(f"{len(text)} tokens saved in {options.file.stat().st_size:,} bytes")

    for owner, question in enumerate(options.questions, start=2):
        caches, metadata = load_prompt_cache(
            options.file, pool, owner, model=model, return_metadata=True
        )
        answer = mlx_lm.generate(
            model,
            tokenizer,
            tokenizer.encode(question, add_special_tokens=False),
            max_tokens=options.max_tokens,
            prompt_cache=caches,
        )
        print(f"\n{question}{answer}\n[{metadata['tokens']} tokens came from the file]")
        caches[0].release()
    print(f"\n{pool}")


if __name__ == "__main__":
    main()
