"""Several answers to one prompt: the prompt's blocks are read by all of them and copied by none.

    python examples/python/parallel_sampling.py MODEL [PROMPT] [--n 4]

MODEL is whatever ``mlx_lm.load`` takes: a folder or the name of a model on a hub.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import kvpool
import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompt", nargs="?", default="Name a colour, and say why you like it.")
    parser.add_argument("--n", type=int, default=4, help="answers")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--temp", type=float, default=0.8)
    options = parser.parse_args()

    model, tokenizer = mlx_lm.load(options.model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": options.prompt}], add_generation_prompt=True, return_dict=False
    )
    longest = len(prompt) + options.max_tokens
    config = kvpool.PoolConfig.for_model(model, max_tokens=longest, n_sequences=options.n + 1)
    pool = kvpool.BlockPoolAllocator(config)
    caches = kvpool.build_paged_caches(model, pool, owner=pool.new_owner())

    with kvpool.attention():
        model(mx.array([prompt[:-1]]), cache=caches)  # once for all
        mx.eval([cache.state for cache in caches])
        before = pool.stats.blocks_in_use()
        requests = [copy.deepcopy(caches) for _ in range(options.n)]
        print(f"{before} blocks hold the prompt, and {pool.stats.blocks_in_use()} after the forks")
        mx.random.seed(0)
        for request in requests:
            print("-", tokenizer.decode(sample(model, prompt[-1:], request, tokenizer, options)))

    alone = sum(cache.n_blocks_held() for request in requests for cache in request)
    print(f"{pool.stats.blocks_in_use()} blocks; {alone} if each answer had its own prompt")
    print(kvpool.attention_stats())


def sample(
    model: Any, start: list[int], caches: list[Any], tokenizer: Any, options: argparse.Namespace
) -> list[int]:
    steps = generate_step(
        mx.array(start),
        model,
        max_tokens=options.max_tokens,
        sampler=make_sampler(options.temp),
        prompt_cache=caches,
    )
    tokens = []
    for token, _ in steps:
        if token in tokenizer.eos_token_ids:
            break
        tokens.append(token)
    return tokens


if __name__ == "__main__":
    main()
