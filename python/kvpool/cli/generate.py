"""`kvpool generate`: a model answers a prompt through the block pool."""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import Any

from kvpool import models
from kvpool.cli import caches
from kvpool.cli.arguments import file_name, owner, positive, seed, temperature, text
from kvpool.cli.caches import CacheChoice, usage_errors
from kvpool.cli.console import note, print_report, progress_bar
from kvpool.cli.decoding import Comparison, Request, compare
from kvpool.cli.errors import ERROR, EXHAUSTED, TOKENS_DIFFER, USAGE, CommandError
from kvpool.cli.loading import encode, load
from kvpool.cli.report import (
    Held,
    comparison_section,
    exhausted,
    headline,
    request_sections,
    write_metrics,
)
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory import BlockPoolAllocator, PoolConfig
from kvpool.memory.block_pool import DEFAULT_BLOCK_SIZE

__all__ = ["add_parser"]

_EXAMPLES = """\
examples:
  kvpool generate --prompt "Why is the sky blue?"
  kvpool generate --prompt "Count to ten." --compare-stock
  kvpool generate --prompt "Tell a story." --n-blocks 300          # too few: exit code 3
  kvpool generate --prompt "Tell a story." --n-blocks 300 --grow
  kvpool generate --prompt "Tell a story." --cache paged --age-policy fp16:64,int8 --compare-stock
  kvpool generate --prompt "Hello" --model mlx-community/Llama-3.2-1B-Instruct-4bit --metrics -
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser(
        "generate",
        help="a model answers a prompt through the block pool",
        description="Generates text with a model whose KV caches draw on a block pool, then shows "
        "what the pool did.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--prompt", type=text, required=True, metavar="TEXT", help="what the model answers"
    )
    parser.add_argument(
        "--model",
        default="smollm2",
        metavar="MODEL",
        help=f"{', '.join(models.KNOWN_MODELS)} (fetched if it is not there), a folder, or the id "
        "of a model on a hub (default: smollm2)",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=100, metavar="N", help="default: 100"
    )
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument(
        "--fp32",
        action="store_true",
        help="run the model in fp32, its quantised weights dequantised: more memory, but several "
        "times faster on a CPU with OpenBLAS",
    )
    parser.add_argument(
        "--temp", type=temperature, default=0.0, help="temperature (default: 0, greedy)"
    )
    parser.add_argument("--seed", type=seed, help="of the sampling")

    pool = parser.add_argument_group("the pool")
    pool.add_argument(
        "--block-size",
        type=positive,
        default=DEFAULT_BLOCK_SIZE,
        metavar="N",
        help=f"token slots in a block (default: {DEFAULT_BLOCK_SIZE})",
    )
    pool.add_argument(
        "--n-blocks",
        type=positive,
        metavar="N",
        help="blocks in the pool (default: enough for the prompt and --max-tokens)",
    )
    pool.add_argument("--grow", action="store_true", help="add blocks when they run out")
    pool.add_argument(
        "--owner", type=owner, help="the request's id in the pool (default: a new one)"
    )

    caches.add_arguments(parser)

    report = parser.add_argument_group("the report")
    report.add_argument(
        "--compare-stock",
        action="store_true",
        help="then decode the prompt again, through the pool and through mlx-lm's own cache in "
        "turns, and compare tokens and speeds",
    )
    report.add_argument(
        "--metrics",
        type=file_name,
        metavar="FILE",
        help="write the pool's Prometheus metrics there (-: to stdout)",
    )
    report.add_argument("--quiet", action="store_true", help="print the generated text alone")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.compare_stock and arguments.temp > 0:
        raise CommandError("--compare-stock compares greedy decoding: leave --temp out", USAGE)
    choice = CacheChoice.of(arguments)
    model, tokenizer = load(arguments.model, fp32=arguments.fp32)
    prompt = encode(tokenizer, arguments.prompt, raw=arguments.raw)
    with usage_errors():
        pool = _make_pool(arguments, model, len(prompt))
    with choice.attention():
        return _generate(arguments, choice, model, tokenizer, prompt, pool)


def _generate(
    arguments: argparse.Namespace,
    choice: CacheChoice,
    model: Any,
    tokenizer: Any,
    prompt: list[int],
    pool: BlockPoolAllocator,
) -> int:
    owner = _owner(arguments, pool)

    def request(cache: list[Any], sampler: Any = None) -> Request:
        return Request(model, tokenizer, prompt, cache, arguments.max_tokens, sampler)

    if not arguments.quiet:
        shortened = textwrap.shorten(arguments.prompt, 300, placeholder=" ...")
        note(f"{headline(arguments.model, pool)}\n\n> {shortened}\n")
    shown = request(choice.build(model, pool, owner), _sampler(arguments))
    code = 0
    try:
        _stream(shown, pool, paged=choice.paged)
        held = Held.by(shown, pool)
    finally:
        stats = pool.stats.snapshot()
        _release(shown)
        if arguments.metrics and not write_metrics(arguments.metrics, stats):
            code = ERROR
    sections = request_sections(shown, stats, held, pool)

    if arguments.compare_stock:
        pooled = request(choice.build(model, pool, pool.new_owner()))
        stock = request(_stock_caches(model))
        before = pool.stats.snapshot()
        result = _compare(pooled, stock, len(shown.tokens))
        after = pool.stats.snapshot()
        sections.append(comparison_section(result, pooled, stock, before, after))
        if choice.is_exact and result.differs_at is not None:
            code = TOKENS_DIFFER
    if not arguments.quiet:
        print()
        print_report(sections)
    return code


def _stream(request: Request, pool: BlockPoolAllocator, *, paged: bool) -> None:
    try:
        for text in request.advance():
            sys.stdout.write(text)
            sys.stdout.flush()
    except BlockPoolExhaustedError as error:
        raise CommandError(exhausted(error, request, pool, paged=paged), EXHAUSTED) from error
    finally:
        if request.tokens:
            print()


def _compare(pooled: Request, stock: Request, n_tokens: int) -> Comparison:
    try:
        with progress_bar("again, next to mlx-lm's own cache", unit="tokens") as progress:
            progress("reading the prompt", 0, n_tokens)
            return compare(pooled, stock, lambda done: progress("decoding", done, n_tokens))
    finally:
        # Each generation has entered a stream of MLX: the one entered last is left first.
        stock.close()
        _release(pooled)


def _owner(arguments: argparse.Namespace, pool: BlockPoolAllocator) -> int:
    if arguments.owner is None:
        return pool.new_owner()
    with usage_errors():  # some ids are kept for new_owner()
        pool.register_owner(arguments.owner)
    pool.release_owner(arguments.owner)
    return int(arguments.owner)


def _stock_caches(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    return caches


def _release(request: Request) -> None:
    request.close()
    for cache in request.cache:
        if hasattr(cache, "release"):
            cache.release()


def _make_pool(arguments: argparse.Namespace, model: Any, n_prompt: int) -> BlockPoolAllocator:
    if arguments.n_blocks is None:
        config = PoolConfig.for_model(
            model,
            max_tokens=n_prompt + arguments.max_tokens,
            block_size=arguments.block_size,
            grow_on_exhaustion=arguments.grow,
            paged=arguments.cache == "paged",
        )
    else:
        config = PoolConfig(
            block_size=arguments.block_size,
            n_blocks=arguments.n_blocks,
            grow_on_exhaustion=arguments.grow,
        )
    return BlockPoolAllocator(config)


def _sampler(arguments: argparse.Namespace) -> Any:
    if arguments.temp == 0:
        return None
    import mlx.core as mx
    from mlx_lm.sample_utils import make_sampler

    if arguments.seed is not None:
        mx.random.seed(arguments.seed)
    return make_sampler(temp=arguments.temp)
