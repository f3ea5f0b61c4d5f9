"""`kvpool methods`: the quantisation methods, what they cost and how good they are."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvpool.cli.console import note, print_grid
from kvpool.cli.errors import USAGE, CommandError
from kvpool.core.exceptions import QuantizerConfigError

if TYPE_CHECKING:
    from kvpool.cache import MethodInfo

__all__ = ["add_parser", "collect"]


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser(
        "methods",
        help="quantised caches: methods, papers, bytes, quality",
        description=(
            "Lists the methods of the quantised caches. Quality is measured here and now, on 512 "
            "normal tokens: the mean cosine of the output to exact attention's, for normal queries "
            "and for queries that one key answers."
        ),
        epilog="examples:\n  kvpool methods\n  kvpool methods --bits 4 --head-dim 64\n"
        "  kvpool methods --json | jq '.[].bytes_per_token'\n",
    )
    parser.add_argument("--bits", type=int, default=2, help="bits of a key coordinate (default 2)")
    parser.add_argument("--head-dim", type=int, default=128, help="numbers in a key (default 128)")
    parser.add_argument("--value-bits", type=int, default=None, help="bits of a value (default 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.set_defaults(run=_run)


def collect(
    bits: int = 2, head_dim: int = 128, value_bits: int | None = None
) -> list[dict[str, Any]]:
    """A row a method: its paper, its size and its quality.

    Raises:
        QuantizerConfigError: A method cannot work so.
    """
    from kvpool.cache import METHODS

    return [_row(info, bits, head_dim, value_bits) for info in METHODS.values()]


def _row(info: MethodInfo, bits: int, head_dim: int, value_bits: int | None) -> dict[str, Any]:
    from kvpool.cache import KVCacheConfig
    from kvpool.cache.quality import measure_quality
    from kvpool.cache.quantized import make_native_method

    config = KVCacheConfig(
        method=info.name, bit_width_inlier=bits, head_dim=head_dim, value_bits=value_bits
    )
    n_bytes = make_native_method(config).bytes_per_token()
    return {
        "method": info.name,
        "title": info.title,
        "arxiv": info.arxiv,
        "bits_per_number": 8 * n_bytes / (2 * head_dim),
        "coded_bytes_per_token": n_bytes,
        **asdict(measure_quality(config)),
    }


def _run(arguments: argparse.Namespace) -> int:
    from kvpool.cache import METHODS

    rows, refusals = [], []
    for info in METHODS.values():
        try:
            rows.append(_row(info, arguments.bits, arguments.head_dim, arguments.value_bits))
        except QuantizerConfigError as error:
            refusals.append((info.name, str(error)))
    if not rows:
        raise CommandError(refusals[0][1], USAGE)
    for name, refusal in refusals:
        note(f"without {name}: {refusal}")
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    print_grid(
        f"kvpool methods: {arguments.bits} bits, head_dim {arguments.head_dim}",
        ("method", "paper", "bits a number", "bytes a token", "at 512", "cosine", "peaked"),
        [
            (
                row["method"],
                f"arXiv:{row['arxiv']}" if row["arxiv"] else row["title"].partition(":")[0],
                f"{row['bits_per_number']:.2f}",
                f"{row['coded_bytes_per_token']:.0f}",
                f"{row['bytes_per_token']:.0f}",
                f"{row['cosine']:.4f}",
                f"{row['peaked_cosine']:.4f}",
            )
            for row in rows
        ],
    )
    return 0
