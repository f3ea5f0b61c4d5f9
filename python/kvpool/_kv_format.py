"""KVFormat: what pages of keys and pages of values hold."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvpool.formats import FORMATS

__all__ = ["PAGE_FORMATS", "KVFormat"]

#: What a page may hold, widest first.
PAGE_FORMATS = ("fp32", "fp16", "bf16", "int8", "int4", "int3", "int2")


class KVFormat(NamedTuple):
    """A format for keys and one for values.

    Written ``int8`` where both have the same and ``int8/int4`` for keys in int8 and values in int4,
    wherever a format is given. "auto" is the type that the numbers come in.
    """

    keys: str
    values: str

    @classmethod
    def checked(cls, where: str, name: str, value: Any, *, auto: bool = False) -> KVFormat:
        """What a user wrote for the argument ``name``; "auto" is allowed with ``auto``.

        Raises:
            TypeError: It is no str.
            ValueError: It names no format that a page may have.
        """
        if not isinstance(value, str):
            raise TypeError(f"[{where}] {name} must be a str, got {value!r}")
        keys, slash, values = (part.strip() for part in value.partition("/"))
        pair = cls(keys, values if slash else keys)
        known = (*PAGE_FORMATS, "auto") if auto else PAGE_FORMATS
        if not set(pair) <= set(known):
            raise ValueError(
                f"[{where}] {name} must be one of {', '.join(known)}, or two of them for keys and "
                f"values as in int8/int4, got {value!r}"
            )
        return pair

    def narrows(self, before: KVFormat) -> bool:
        """Whether tokens may go from ``before`` to this: a stream keeps its format or gets fewer
        bits, and one of them does."""
        kept = [mine == theirs for mine, theirs in zip(self, before, strict=True)]
        fewer = [_bits(mine) < _bits(theirs) for mine, theirs in zip(self, before, strict=True)]
        return any(fewer) and all(a or b for a, b in zip(kept, fewer, strict=True))

    def __str__(self) -> str:
        return self.keys if self.keys == self.values else f"{self.keys}/{self.values}"


def _bits(name: str) -> float:
    return float("inf") if name == "auto" else FORMATS[name].bits
