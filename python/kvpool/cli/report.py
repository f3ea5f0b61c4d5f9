"""What `kvpool generate` says of a request, its pool and the comparison with mlx-lm."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpool import models
from kvpool.cli.blas import blas_in_use
from kvpool.cli.console import Section, count, megabytes, note
from kvpool.cli.decoding import SEGMENT_TOKENS, Comparison, Request
from kvpool.core.exceptions import BlockPoolExhaustedError
from kvpool.memory import AllocationStats, BlockPoolAllocator, PoolConfig

__all__ = [
    "Held",
    "comparison_section",
    "exhausted",
    "headline",
    "request_sections",
    "write_metrics",
]

METRICS_PREFIX = "kvpool_block_pool"


def headline(model_name: str, pool: BlockPoolAllocator) -> str:
    """Which model runs where, over which pool."""
    import mlx.core as mx

    spec = models.KNOWN_MODELS.get(model_name)
    device = "GPU" if mx.default_device().type == mx.DeviceType.gpu else "CPU"
    blas = f" (BLAS: {' '.join(blas_in_use().split()[:2])})" if device == "CPU" else ""
    return (
        f"model: {spec.title if spec else model_name}, on the {device}{blas}\n"
        f"pool:  {count(pool.stats.n_blocks, 'block')} of {count(pool.config.block_size, 'token')}"
    )


@dataclass(frozen=True)
class Held:
    """What a request holds before its release.

    Attributes:
        n_bytes: Bytes of its keys and values.
        n_tokens: Tokens in its caches.
        formats: The number of its blocks by what they hold.
        attention: Who answered the calls of attention; None without paged caches.
    """

    n_bytes: int
    n_tokens: int
    formats: Mapping[str, int]
    attention: str | None

    @classmethod
    def by(cls, request: Request, pool: BlockPoolAllocator) -> Held:
        """What ``request`` holds now."""
        tokens = [cache.size() for cache in request.cache]
        owners = {cache.owner for cache in request.cache if hasattr(cache, "owner")}
        blocks = [block for owner in owners for block in pool.blocks_for(owner)]
        return cls(
            n_bytes=sum(cache.nbytes for cache in request.cache),
            n_tokens=max(tokens, default=0),
            formats=Counter(block.format for block in blocks),
            attention=_who_attended(),
        )


def _who_attended() -> str | None:
    paged = sys.modules.get("kvpool.mlx_lm.paged")
    if paged is None or not paged.is_attention_installed():
        return None
    return str(paged.attention_stats())


def request_sections(
    request: Request, stats: AllocationStats, held: Held, pool: BlockPoolAllocator
) -> list[Section]:
    """The request as it was before its release, when ``stats`` was taken."""
    in_use = stats.blocks_in_use()
    slots = in_use * pool.config.block_size
    prompt, answer = count(len(request.prompt), "token"), count(len(request.tokens), "token")
    return [
        (
            "The request",
            [
                ("prompt", f"{prompt}, {request.prompt_speed:.1f} a second"),
                ("answer", f"{answer}, {request.decode_speed:.2f} a second"),
                *([("attention", held.attention)] if held.attention else []),
            ],
        ),
        (
            "Its blocks",
            [
                ("in use", f"{in_use:,} of {stats.n_blocks:,}, peak {stats.peak_blocks_in_use:,}"),
                ("bytes held", f"{megabytes(held.n_bytes)}, {_bytes_a_token(held)}"),
                ("they hold", ", ".join(f"{name} in {n:,}" for name, n in held.formats.items())),
                ("unused slots", f"{stats.unused_slots():,} of {slots:,}"),
                ("fragmentation", f"{stats.fragmentation():.1%} of the blocks are partly filled"),
                ("reused", f"{stats.n_reused:,} of {stats.n_allocations:,} handed out"),
                ("after the release", f"{pool.stats.blocks_in_use():,} in use"),
            ],
        ),
    ]


def _bytes_a_token(held: Held) -> str:
    return f"{held.n_bytes / held.n_tokens:,.0f} a token" if held.n_tokens else "no token"


def comparison_section(
    result: Comparison,
    pooled: Request,
    stock: Request,
    before: AllocationStats,
    after: AllocationStats,
) -> Section:
    """The second request next to mlx-lm's own cache; the pool's stats before and after it."""
    if result.differs_at is None:
        tokens = f"identical, all {len(stock.tokens):,}"
    else:
        tokens = f"they differ from token {result.differs_at + 1:,} on"
    if result.speed_ratios:
        low, middle, high = result.speed_spread
        segments = count(len(result.speed_ratios), "segment")
        ratio = f"{middle:.2f} (median; {low:.2f} to {high:.2f} in {segments} in turns)"
    else:
        ratio = f"not measured: fewer than {SEGMENT_TOKENS} tokens after the first"
    taken = after.n_allocations - before.n_allocations
    return (
        "The same prompt again, next to mlx-lm's own cache",
        [
            ("tokens", tokens),
            ("a second, pool", f"{pooled.decode_speed:.2f} tokens"),
            ("a second, mlx-lm", f"{stock.decode_speed:.2f} tokens"),
            ("speed, pool / mlx-lm", ratio),
            ("blocks reused", f"{after.n_reused - before.n_reused:,} of {taken:,} handed out"),
        ],
    )


def exhausted(
    error: BlockPoolExhaustedError, request: Request, pool: BlockPoolAllocator, *, paged: bool
) -> str:
    """Why the request stopped and what it takes to go on."""
    if error.needed_bytes is not None and error.available_bytes is not None:
        return (
            f"the byte budget ran out: {error.needed_bytes:,} more bytes are needed, "
            f"{error.available_bytes:,} are left; the prompt has {len(request.prompt)} tokens, "
            f"{len(request.tokens)} were generated; a larger --byte-budget or a narrower --format "
            "holds more"
        )
    block_size, n_blocks = pool.config.block_size, pool.stats.n_blocks
    wanted = len(request.prompt) + request.max_tokens

    def blocks_for(tokens: int) -> int:
        config = PoolConfig.for_model(
            request.model, max_tokens=tokens, block_size=block_size, paged=paged
        )
        return config.n_blocks

    fits = _tokens_that_fit(blocks_for, n_blocks, wanted)
    needed = blocks_for(wanted)
    return (
        f"the pool ran out: {count(n_blocks, 'block')} of {block_size} hold "
        f"{count(fits, 'token')} of this model; the prompt has {len(request.prompt)}, "
        f"{len(request.tokens)} were generated; --n-blocks {needed} holds all {wanted}, "
        "--grow adds blocks as needed"
    )


def write_metrics(target: str, stats: AllocationStats) -> bool:
    """Writes the Prometheus text to a file, or to standard output for ``-``; says so and returns
    False where the file cannot be written: an answer is not lost for that."""
    text = stats.to_prometheus(prefix=METRICS_PREFIX)
    if target == "-":
        sys.stdout.write(text)
        return True
    try:
        Path(target).write_text(text)
    except OSError as error:
        note(f"kvpool: error: cannot write the metrics: {error}")
        return False
    return True


def _tokens_that_fit(blocks_for: Callable[[int], int], n_blocks: int, at_most: int) -> int:
    """The longest sequence, up to ``at_most``, whose caches take no more than ``n_blocks``."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        fits = blocks_for(middle) <= n_blocks
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
