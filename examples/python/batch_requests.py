"""Two requests of unequal length, answered in one batch over one block pool.

    python examples/python/batch_requests.py MODEL [PROMPT PROMPT ...]

MODEL is whatever ``mlx_lm.load`` takes: a folder or the name of a model on a hub.
"""

from __future__ import annotations

import argparse

import mlx_lm
from kvpool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm import pool_model

PROMPTS = ["What is a key-value cache?", "Name three primes."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--max-tokens", type=int, default=40)
    options = parser.parse_args()

    model, tokenizer = mlx_lm.load(options.model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in options.prompts
    ]
    longest = max(map(len, prompts)) + options.max_tokens
    config = PoolConfig.for_model(model, max_tokens=longest, n_sequences=len(prompts))
    pool = BlockPoolAllocator(config)
    print(config.sizing)

    # Each request has an owner of its own; the batch that mlx-lm makes of them has another.
    with pool_model(model, pool):
        answers = mlx_lm.batch_generate(
            model, tokenizer, prompts, max_tokens=options.max_tokens, return_prompt_caches=True
        )
    for prompt, text, caches in zip(options.prompts, answers.texts, answers.caches, strict=True):
        blocks = pool.blocks_for(caches[0].owner)
        print(f"\n{prompt}\n{text}\n[{caches[0].offset} tokens in {len(blocks)} blocks]")
        caches[0].release()
    print(f"\n{pool}")


if __name__ == "__main__":
    main()
