"""What `kvpool generate` says of a request, its pool and the comparison with mlx-lm."""

from __future__ import annotations

import sys
from pathlib import Path

from kvpool import models
from kvpool.cli.blas import blas_in_use
from kvpool.cli.console import count
from kvpool.cli.decoding import SEGMENT_TOKENS, Comparison, Request
from kvpool.cli.errors import CommandError
from kvpool.memory import AllocationStats, BlockPoolAllocator, PoolConfig

__all__ = [
    "comparison_rows",
    "exhausted",
    "headline",
    "request_rows",
    "reuse_row",
    "write_metrics",
]

METRICS_PREFIX = "kvpool_block_pool"

Row = tuple[str, str]


def headline(model_name: str) -> str:
    """Which model runs where."""
    import mlx.core as mx

    title = (
        models.KNOWN_MODELS[model_name].title if model_name in models.KNOWN_MODELS else model_name
    )
    if mx.default_device().type == mx.DeviceType.gpu:
        return f"{title} on the GPU"
    blas = " ".join(blas_in_use().split()[:2])
    return f"{title} on the CPU (BLAS: {blas})"


def request_rows(
    request: Request, stats: AllocationStats, n_bytes: int, pool: BlockPoolAllocator
) -> list[Row]:
    """The request as it was before its release, when ``stats`` was taken."""
    in_use = stats.blocks_in_use()
    slots = in_use * pool.config.block_size
    prompt, generated = count(len(request.prompt), "token"), count(len(request.tokens), "token")
    return [
        ("prompt", f"{prompt}, {request.prompt_speed:.1f} a second"),
        ("generated", f"{generated}, {request.decode_speed:.2f} a second"),
        ("blocks in use", f"{in_use:,} of {stats.n_blocks:,}, peak {stats.peak_blocks_in_use:,}"),
        ("bytes held", f"{n_bytes:,}"),
        ("fragmentation", f"{stats.fragmentation():.1%} of the blocks are partly filled"),
        ("unused slots", f"{stats.unused_slots():,} of {slots:,}"),
        ("reuse", f"{stats.n_reused:,} of {count(stats.n_allocations, 'block')} handed out"),
        ("after its release", f"{count(pool.stats.blocks_in_use(), 'block')} in use"),
    ]


def reuse_row(before: AllocationStats, after: AllocationStats) -> Row:
    """What a second request took over from the first; the counters before and after it."""
    taken = after.n_allocations - before.n_allocations
    reused = after.n_reused - before.n_reused
    return ("a second request", f"reused {reused:,} of its {count(taken, 'block')}")


def comparison_rows(result: Comparison, pooled: Request, stock: Request) -> list[Row]:
    if result.differs_at is None:
        tokens = f"identical, all {len(stock.tokens):,}"
    else:
        tokens = f"they differ from token {result.differs_at + 1:,} on"
    speeds = f"pool {pooled.decode_speed:.2f}, mlx-lm {stock.decode_speed:.2f}"
    if result.speed_ratio is None:
        ratio = f"not measured: fewer than {SEGMENT_TOKENS} tokens"
    else:
        ratio = f"{result.speed_ratio:.3f}, median of {result.n_segments} segments in turns"
    return [
        ("tokens, pool and mlx-lm", tokens),
        ("tokens a second", speeds),
        ("speed, pool / mlx-lm", ratio),
    ]


def exhausted(request: Request, pool: BlockPoolAllocator) -> str:
    """Why the request stopped and what it takes to go on."""
    block_size, n_blocks = pool.config.block_size, pool.stats.n_blocks
    wanted = len(request.prompt) + request.max_tokens
    fits = _tokens_that_fit(request.model, block_size, n_blocks, wanted)
    needed = _blocks_for(request.model, block_size, wanted)
    return (
        f"the pool ran out: {count(n_blocks, 'block')} of {block_size} hold "
        f"{count(fits, 'token')} of this model; the prompt has {len(request.prompt)}, "
        f"{len(request.tokens)} were generated; --n-blocks {needed} holds all {wanted}, "
        "--grow adds blocks as needed"
    )


def write_metrics(target: str, stats: AllocationStats) -> None:
    """Writes the Prometheus text to a file, or to standard output for ``-``."""
    text = stats.to_prometheus(prefix=METRICS_PREFIX)
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise CommandError(f"cannot write the metrics: {error}") from error


def _tokens_that_fit(model: object, block_size: int, n_blocks: int, at_most: int) -> int:
    """The longest sequence, up to ``at_most``, whose caches take no more than ``n_blocks``."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        fits = _blocks_for(model, block_size, middle) <= n_blocks
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _blocks_for(model: object, block_size: int, tokens: int) -> int:
    return PoolConfig.for_model(model, max_tokens=tokens, block_size=block_size).n_blocks
