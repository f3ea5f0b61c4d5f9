"""AgePolicy: what older tokens of a sequence are kept in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvpool._kv_format import KVFormat
from kvpool.mlx_lm.caches._arguments import checked_int

__all__ = ["AgePolicy"]


@dataclass(frozen=True)
class AgePolicy:
    """Blocks that grow old are kept in fewer bits, and the bytes that this frees go back.

        AgePolicy(256, [("int8", 2048), ("int4", None)])

    keeps the newest 256 tokens as they came, the 2,048 before them in 8 bits and all older ones in
    4. A format is one for keys and values, or two: "int8/int4" keeps keys in 8 bits and values in
    4. Whole blocks change, when the last of their tokens is old enough: up to a block more is kept
    exact. What was once rounded stays so, also where the sequence is trimmed.

    Args:
        recent: Newest tokens that stay in the format of the cache, >= 0.
        then: Pairs of a format and the number of tokens in it, from young to old, each narrower
            than the one before, for keys or values at least. The last number is None: all the rest.
        first: The format of the recent tokens, where the policy names one ("fp16:256,int8").

    Raises:
        ValueError: A number is negative, a format is unknown or not narrower, or something follows
            a None.
        TypeError: An argument is of another type.
    """

    recent: int
    then: tuple[tuple[str, int | None], ...]
    first: str | None = None

    def __init__(
        self,
        recent: int,
        then: Iterable[tuple[str, int | None]],
        first: str | None = None,
    ) -> None:
        where = "AgePolicy"
        if first is not None:
            first = str(KVFormat.checked(where, "first", first, auto=True))
            first = None if first == "auto" else first
        tiers = tuple(_checked_tier(where, tier) for tier in then)
        if not tiers:
            raise ValueError(f"[{where}] then must name a format for older tokens, got none")
        for _, n_tokens in tiers[:-1]:
            if n_tokens is None:
                raise ValueError(f"[{where}] then: only the last number may be None, got {tiers}")
        if tiers[-1][1] is not None:
            raise ValueError(f"[{where}] then: the last number must be None, got {tiers[-1][1]}")
        for wider, narrower in pairwise([first or "auto", *(name for name, _ in tiers)]):
            if not _pair(narrower).narrows(_pair(wider)):
                raise ValueError(
                    f"[{where}] {narrower} must be narrower than {wider}, which comes before it"
                )
        object.__setattr__(self, "recent", checked_int(where, "recent", recent, 0))
        object.__setattr__(self, "then", tiers)
        object.__setattr__(self, "first", first)
        age = self.steps()[-1][1]
        if age > 2**63 - 1:
            raise ValueError(f"[{where}] recent and then must add up to 64 bits, got {age} tokens")

    @classmethod
    def parse(cls, text: str) -> AgePolicy:
        """The policy that ``str`` writes: ``"fp16:256,int8:2048,int4"``.

        Formats from young to old, each with its number of tokens but the last. ``auto`` comes first
        where the recent tokens are to stay as they come: ``"auto:256,int8"``.

        Raises:
            ValueError: As ``AgePolicy`` does, or the text reads otherwise.
        """
        where = "AgePolicy::parse"
        if not isinstance(text, str):
            raise TypeError(f"[{where}] text must be a str, got {text!r}")
        tiers = [_parsed_tier(where, part, text) for part in text.split(",")]
        (first, recent), then = tiers[0], tiers[1:]
        if recent is None:
            raise ValueError(f"[{where}] the first format needs a number of tokens, got {text!r}")
        return cls(recent, then, first)

    def __str__(self) -> str:
        tiers = [(self.first or "auto", self.recent), *self.then]
        return ",".join(name if n is None else f"{name}:{n}" for name, n in tiers)

    def steps(self) -> list[tuple[str, int]]:
        """Pairs of a format and the age, in tokens, from which on it is used."""
        steps, age = [], self.recent
        for name, n_tokens in self.then:
            steps.append((name, age))
            age += n_tokens or 0
        return steps

    def stream_steps(self, stream: int, recent: str) -> list[tuple[str, int]]:
        """``steps`` of keys (0) or values (1) alone whose new tokens are in ``recent``: those at
        which their format changes."""
        steps = []
        for name, age in self.steps():
            if (format := _pair(name)[stream]) != recent:
                steps.append((format, age))
                recent = format
        return steps


def _pair(text: str) -> KVFormat:
    return KVFormat.checked("AgePolicy", "format", text, auto=True)


def _checked_tier(where: str, tier: Any) -> tuple[str, int | None]:
    if isinstance(tier, str) or not isinstance(tier, Iterable) or len(pair := tuple(tier)) != 2:
        raise TypeError(f"[{where}] then must be pairs (format, tokens), got {tier!r}")
    name, n_tokens = pair
    name = str(KVFormat.checked(where, "then", name))
    return name, None if n_tokens is None else checked_int(where, "then", n_tokens, 1)


def _parsed_tier(where: str, part: str, text: str) -> tuple[str, int | None]:
    name, colon, number = (piece.strip() for piece in part.partition(":"))
    if colon and not number.isdecimal():
        raise ValueError(f"[{where}] {name} needs a number of tokens, got {text!r}")
    return name, int(number) if colon else None
