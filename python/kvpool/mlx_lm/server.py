"""mlx-lm's server with every request's cache in one block pool.

    python -m kvpool.mlx_lm.server --model PATH --pool-memory 4GB --port 8080

All other options are those of ``mlx_lm.server``. Requests are served in batches as usual; the
prompts that the server keeps for reuse (``--prompt-cache-size``) are charged to the pool, too.

With paged caches the pool cannot run out under requests: one begins when there is room for its
prompt and ``max_tokens`` more, waits in order until then, and is refused (HTTP status 413) where
the whole pool has too little. ``GET /metrics`` says how many wait, and what the pool holds.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from mlx_lm import server
from mlx_lm.models.cache import LRUPromptCache

from kvpool.core.exceptions import RequestTooLargeError
from kvpool.memory._model_sizing import parse_memory
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig
from kvpool.mlx_lm.admission import Admission, PagedBatchGenerator
from kvpool.mlx_lm.paged import attention
from kvpool.mlx_lm.pooling import PooledModel, pool_model

__all__ = [
    "PooledHandler",
    "PooledModelProvider",
    "PooledResponseGenerator",
    "main",
    "pooled_parts",
]

METRICS_PREFIX = "kvpool_block_pool"


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
        self.kept: LRUPromptCache | None = None

    def _load(self, *paths: str | None) -> None:
        self.pooled = None
        super()._load(*paths)
        self.pooled = pool_model(self.model, self._make_pool(self.model), **self._options)
        if self.admission is not None:
            self.admission.kept = self.kept

    @property
    def pool(self) -> BlockPoolAllocator | None:
        """The pool of the model that is loaded."""
        return None if self.pooled is None else self.pooled.pool

    @property
    def admission(self) -> Admission | None:
        """Who may begin, where the caches of the model are paged."""
        return None if self.pooled is None else self.pooled.admission


class PooledResponseGenerator(server.ResponseGenerator):
    """A ``mlx_lm.server.ResponseGenerator`` that refuses what the pool could never hold.

    Args:
        model_provider: Whose models are pooled.
        prompt_cache: Keeps prompts for requests to come, as long as nobody needs their blocks.
    """

    def __init__(self, model_provider: PooledModelProvider, prompt_cache: LRUPromptCache) -> None:
        model_provider.kept = prompt_cache
        super().__init__(model_provider, prompt_cache)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """Where mlx-lm first knows a request's tokens, and takes an exception for its answer."""
        tokenized = super()._tokenize(tokenizer, request, args)
        if (admission := self.model_provider.admission) is not None:
            prompt, *_, vision = tokenized
            chunk = self.cli_args.prefill_step_size
            admission.check(len(prompt), args.max_tokens, chunk=chunk)
            if vision is not None or not self._is_batchable(args):
                admission.make_room(len(prompt) + args.max_tokens, chunk=chunk)
        return tokenized


class PooledHandler(server.APIHandler):
    """A ``mlx_lm.server.APIHandler`` that knows of refused requests and of ``GET /metrics``."""

    def _set_completion_headers(self, status_code: int = 200) -> None:
        # mlx-lm answers 404 to whatever went wrong before the first token.
        refused = isinstance(sys.exc_info()[1], RequestTooLargeError)
        super()._set_completion_headers(413 if refused else status_code)

    def do_GET(self) -> None:
        provider = self.response_generator.model_provider
        if self.path != "/metrics" or provider.pool is None:
            super().do_GET()
            return
        text = provider.pool.stats.to_prometheus(prefix=METRICS_PREFIX)
        if provider.admission is not None:
            text += provider.admission.stats.to_prometheus(f"{METRICS_PREFIX}_requests")
        self.send_response(200)
        self.send_header("Content-type", "text/plain; version=0.0.4")
        self._set_cors_headers()
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def pooled_parts(make_provider: Callable[[argparse.Namespace], Any]) -> Iterator[None]:
    """Lets ``mlx_lm.server`` build itself from the parts here for the time of a ``with`` block."""
    parts = {
        "ModelProvider": make_provider,
        "ResponseGenerator": PooledResponseGenerator,
        "BatchGenerator": PagedBatchGenerator,
        "_run_http_server": functools.partial(server._run_http_server, handler_class=PooledHandler),
    }
    before = {name: getattr(server, name) for name in parts}
    try:
        for name, part in parts.items():
            setattr(server, name, part)
        yield
    finally:
        for name, part in before.items():
            setattr(server, name, part)


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

    def make_provider(cli_args: argparse.Namespace) -> PooledModelProvider:
        return PooledModelProvider(cli_args, make_pool, paged=paged, **chosen)

    argv, sys.argv = sys.argv, [parser.prog, *others]
    try:
        with pooled_parts(make_provider), attention() if paged else nullcontext():
            server.main()
    finally:
        sys.argv = argv


if __name__ == "__main__":
    main()
