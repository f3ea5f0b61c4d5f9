"""Checks of arguments that the caches share."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvpool.memory.block_pool import BlockPoolAllocator


def checked_pool(where: str, pool: Any) -> BlockPoolAllocator:
    """``pool``, which must be a BlockPoolAllocator."""
    if not isinstance(pool, BlockPoolAllocator):
        raise TypeError(f"[{where}] pool must be a BlockPoolAllocator, got {pool!r}")
    return pool


def checked_int(where: str, name: str, value: Any, least: int, most: int = 2**63 - 1) -> int:
    """``value`` as an int of ``least..most``, through ``__index__``; bool and float are refused."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"[{where}] {name} must be an int, got {value!r}")
    number = operator.index(value)
    if not least <= number <= most:
        bound = f">= {least}" if number < least else f"<= {most}"
        raise ValueError(f"[{where}] {name} must be {bound}, got {number}")
    return number


def checked_owner(where: str, owner: Any) -> int:
    """``owner`` as a 64-bit int."""
    return checked_int(where, "owner", owner, -(2**63))


def checked_state(
    where: str, state: Any, parts: Sequence[str], least: int | None = None
) -> Sequence[Any]:
    """``state``, which must be a tuple or list of these parts, of ``least`` of them at least."""
    least = len(parts) if least is None else least
    if not isinstance(state, (tuple, list)):
        raise TypeError(f"[{where}] state must be a tuple or list, got {state!r}")
    if not least <= len(state) <= len(parts):
        raise ValueError(f"[{where}] state must be ({', '.join(parts)}), got {len(state)} items")
    return state


def checked_buffers(where: str, keys: Any, values: Any) -> None:
    """Refuses what is no pair of arrays (batch, heads, tokens, dims) that differ in dims alone."""
    for name, array in (("keys", keys), ("values", values)):
        if not isinstance(array, mx.array):
            raise TypeError(f"[{where}] {name} must be an mx.array, got {type(array).__name__}")
        if array.ndim != 4:
            raise ValueError(
                f"[{where}] {name} must have shape (batch, heads, tokens, dims), got {array.shape}"
            )
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"[{where}] keys and values must agree in batch, heads and tokens, "
            f"got {keys.shape} and {values.shape}"
        )


def checked_quantized(where: str, keys: Any, values: Any) -> None:
    """Refuses what is no pair of (codes, scales, biases) for one number of tokens."""
    for name, buffer in (("keys", keys), ("values", values)):
        if not isinstance(buffer, (tuple, list)) or len(buffer) != 3:
            raise TypeError(f"[{where}] {name} must be (codes, scales, biases)")
    for parts in zip(keys, values, strict=True):
        checked_buffers(where, *parts)
    if len({array.shape[:3] for array in (*keys, *values)}) > 1:
        raise ValueError(f"[{where}] codes, scales and biases differ in batch, heads or tokens")


def checked_fit(where: str, name: str, new: mx.array, old: mx.array | None) -> None:
    """Refuses ``new`` where it cannot be appended to the buffer ``old``."""
    if old is not None and (*old.shape[:2], old.shape[3]) != (*new.shape[:2], new.shape[3]):
        raise ValueError(
            f"[{where}] {name} of shape {new.shape} do not fit the cache's, {old.shape}"
        )


def as_list(values: Any) -> Any:
    """``values`` as a list where they are an array of MLX."""
    return values.tolist() if isinstance(values, mx.array) else values


def format_name(dtype: mx.Dtype) -> str:
    """The pool's name for blocks that hold numbers of ``dtype``."""
    return _FORMATS.get(dtype) or str(dtype).removeprefix("mlx.core.")


_FORMATS = {mx.float16: "fp16", mx.bfloat16: "bf16", mx.float32: "fp32"}
