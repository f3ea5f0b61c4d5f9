"""Which caches `kvpool generate` puts behind a request."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from kvpool._kv_format import KVFormat
from kvpool.cli.arguments import positive
from kvpool.cli.errors import USAGE, CommandError
from kvpool.memory import BlockPoolAllocator

__all__ = ["CacheChoice", "add_arguments"]

_PAGED_OPTIONS = ("format", "method", "bits", "age_policy", "byte_budget", "backend")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the caches")
    group.add_argument(
        "--cache",
        choices=("pooled", "paged"),
        default="pooled",
        help="pooled: contiguous buffers that the pool counts (default); paged: tokens lie in "
        "blocks and are read there",
    )
    group.add_argument(
        "--format",
        metavar="NAME",
        help="of the pages: fp32, fp16, bf16, int8, int4, int3, int2, or auto (default: as the "
        "tokens come); two of them, as in int8/int4, for keys and values",
    )
    group.add_argument(
        "--age-policy",
        metavar="TEXT",
        help="formats from young to old with their numbers of tokens: fp16:256,int8:2048,int4",
    )
    group.add_argument(
        "--method", metavar="NAME", help="a quantisation method for full blocks: kvpool methods"
    )
    group.add_argument("--bits", type=positive, metavar="N", help="of --method (default: 3)")
    group.add_argument(
        "--byte-budget", type=positive, metavar="BYTES", help="that all pages together may take"
    )
    group.add_argument(
        "--backend",
        choices=("cpu", "cuda", "gather"),
        help="where pages lie and who reads them; gather: MLX's own attention, over gathered keys "
        "and values (default: what fits MLX's default device)",
    )


@contextmanager
def usage_errors() -> Iterator[None]:
    """What is wrong with an argument of a call is wrong with the option that it came from."""
    try:
        yield
    except ValueError as error:
        raise CommandError(str(error), USAGE) from error


@dataclass(frozen=True)
class CacheChoice:
    """Pooled caches, or paged ones with their options."""

    paged: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> CacheChoice:
        """What the command line asks for.

        Raises:
            CommandError: Options that do not go together, or that there are not.
        """
        given = {name: getattr(arguments, name) for name in _PAGED_OPTIONS}
        options = {name: value for name, value in given.items() if value is not None}
        if arguments.cache != "paged":
            for name in options:
                raise CommandError(f"--{name.replace('_', '-')} needs --cache paged", USAGE)
            return cls()
        from kvpool.mlx_lm.paged.page_format import PageFormat

        with usage_errors():
            PageFormat.checked(
                "kvpool generate",
                options.get("format", "auto"),
                options.get("age_policy"),
                options.get("method"),
                options.get("bits"),
            )
        return cls(True, options)

    @property
    def is_exact(self) -> bool:
        """Whether keys and values stay as the model made them."""
        rounding = {k: v for k, v in self.options.items() if k not in ("byte_budget", "backend")}
        formats = KVFormat.checked(
            "kvpool generate", "format", rounding.pop("format", "auto"), auto=True
        )
        return not rounding and set(formats) <= {"auto", "fp32"}

    def build(self, model: Any, pool: BlockPoolAllocator, owner: int) -> list[Any]:
        """The caches of one request.

        Raises:
            CommandError: The options do not fit the model.
        """
        if self.paged:
            from kvpool.mlx_lm.paged import build_paged_caches

            with usage_errors():
                return build_paged_caches(model, pool, owner, **self.options)
        from kvpool.memory import build_pooled_caches

        return build_pooled_caches(model, pool, owner)

    def attention(self) -> AbstractContextManager[None]:
        """The attention hook, where these caches gain by it."""
        if not self.paged:
            return nullcontext()
        from kvpool.mlx_lm.paged import attention, reset_attention_stats

        reset_attention_stats()
        return attention()
