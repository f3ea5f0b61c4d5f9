"""mlx-lm's server with every request's cache in one block pool.

    python -m kvpool.mlx_lm.server --model PATH --pool-memory 4GB --port 8080

All other options are those of ``mlx_lm.server``. Requests are served in batches as usual; the
prompts that the server keeps for reuse (``--prompt-cache-size``) are charged to the pool, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from mlx_lm import server

from kvpool.memory._model_sizing import parse_memory
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm.paged import attention
from kvpool.mlx_lm.pooling import PooledModel, pool_model

__all__ = ["PooledModelProvider", "main"]


class PooledModelProvider(server.ModelProvider):
    """A ``mlx_lm.server.ModelProvider`` whose models are charged to a pool.

    Args:
        cli_args: The options of ``mlx_lm.server``.
        make_pool: Makes the pool of a model, once it is loaded.
        options: Of ``pool_model``: which caches the requests get.
    """

    def __init__(
        self,
        cli_args: argparse.Namespace,
        make_pool: Callable[[Any], BlockPoolAllocator],
        **options: Any,
    ) -> None:
        super().__init__(cli_args)
        self._make_pool, self._options = make_pool, options
        self.pooled: PooledModel | None = None

    def _load(self, *paths: str | None) -> None:
        self.pooled = None
        super()._load(*paths)
        self.pooled = pool_model(self.model, self._make_pool(self.model), **self._options)

    @property
    def pool(self) -> BlockPoolAllocator | None:
        """The pool of the model that is loaded."""
        return None if self.pooled is None else self.pooled.pool


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the server until it is interrupted.

    Args:
        arguments: The command line, ``sys.argv[1:]`` where None.
    """
    parser = argparse.ArgumentParser(
        prog="kvpool.mlx_lm.server",
        description="mlx-lm's server over a block pool; other options go to mlx_lm.server.",
    )
    parser.add_argument(
        "--pool-memory", default="4GB", help="keys and values of all requests together (4GB)"
    )
    parser.add_argument("--pool-block-size", type=int, default=16, help="tokens in a block (16)")
    parser.add_argument(
        "--pool-cache",
        choices=("pooled", "paged"),
        default="pooled",
        help="pooled: contiguous buffers (default); paged: tokens lie in blocks, are read there, "
        "and prompts that are kept share them",
    )
    parser.add_argument(
        "--pool-format",
        help="of paged caches: fp16, int8, int8/int4 for keys and values, ... (as tokens come)",
    )
    parser.add_argument("--pool-age-policy", help="of paged caches: fp16:256,int8:2048,int4")
    parser.add_argument(
        "--pool-backend",
        choices=("cpu", "cuda", "gather"),
        help="of paged caches: where pages lie and who reads them (what fits MLX's default device)",
    )
    options, others = parser.parse_known_args(arguments)
    paged = options.pool_cache == "paged"
    chosen = {
        "format": options.pool_format,
        "age_policy": options.pool_age_policy,
        "backend": options.pool_backend,
    }
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if chosen and not paged:
        parser.error("--pool-format, --pool-age-policy and --pool-backend need --pool-cache paged")
    try:  # now, not when a model was loaded
        parse_memory(options.pool_memory)
        PoolConfig(block_size=options.pool_block_size)
        if paged:
            from kvpool.mlx_lm.paged.page_format import PageFormat

            formats = chosen.get("format", "auto"), chosen.get("age_policy")
            PageFormat.checked(parser.prog, *formats, None, None)
    except ValueError as error:
        parser.error(str(error))

    def make_pool(model: Any) -> BlockPoolAllocator:
        return BlockPoolAllocator(
            PoolConfig.for_model(
                model,
                memory=options.pool_memory,
                block_size=options.pool_block_size,
                paged=paged,
                format=options.pool_format or "auto",
            )
        )

    stock, argv = server.ModelProvider, sys.argv
    server.ModelProvider = lambda cli_args: PooledModelProvider(
        cli_args, make_pool, paged=paged, **chosen
    )
    sys.argv = [parser.prog, *others]
    try:
        with attention() if paged else nullcontext():
            server.main()
    finally:
        server.ModelProvider, sys.argv = stock, argv


if __name__ == "__main__":
    main()
