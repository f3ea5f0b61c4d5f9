"""Share of allocated token slots that no token uses, over the requests of a trace.

    python benchmarks/unused_slots.py azure_llm_2023_conv.csv

The trace is a CSV with the columns ContextTokens and GeneratedTokens, a row a request, as the Azure
LLM inference traces of 2023 have (github.com/Azure/AzurePublicDataset, CC-BY 4.0). Every request
is charged to one pool at its full length; 256 is what mlx-lm's cache grows by.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from kvpool.memory import BlockPoolAllocator, PoolConfig

BLOCK_SIZES = (16, 32, 64, 256, 512)


def lengths(trace: Path) -> list[int]:
    with trace.open(newline="") as rows:
        return [
            int(row["ContextTokens"]) + int(row["GeneratedTokens"]) for row in csv.DictReader(rows)
        ]


def unused_share(requests: list[int], block_size: int) -> float:
    n_blocks = sum(-(-n_tokens // block_size) for n_tokens in requests)
    pool = BlockPoolAllocator(
        PoolConfig(block_size=block_size, n_blocks=n_blocks, separate_kv=False)
    )
    for owner, n_tokens in enumerate(requests):
        pool.allocate("k", n_tokens, owner)
    return pool.stats.unused_slots() / (n_blocks * block_size)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="CSV file")
    options = parser.parse_args()
    requests = lengths(options.trace)
    print(f"{len(requests):,} requests, {sum(requests):,} tokens")
    for block_size in BLOCK_SIZES:
        print(f"block size {block_size:4}: {unused_share(requests, block_size):6.2%} unused")


if __name__ == "__main__":
    main()
