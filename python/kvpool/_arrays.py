"""Arrays as callers hand them over: MLX, numpy or nested lists. Imports MLX only for MLX arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def is_mlx(value: object) -> bool:
    """Whether ``value`` is an MLX array, without importing MLX to find out."""
    return type(value).__module__.partition(".")[0] == "mlx"


def is_bfloat16(value: Any) -> bool:
    """Whether ``value`` is an MLX array or an ml_dtypes one of bfloat16s."""
    if is_mlx(value):
        import mlx.core as mx

        return bool(value.dtype == mx.bfloat16)
    dtype = getattr(value, "dtype", None)
    # numpy has none of its own: the dtype of ml_dtypes is of kind V.
    return isinstance(dtype, np.dtype) and dtype.kind == "V" and dtype.name == "bfloat16"


def _bfloat16_bits(value: Any) -> Array:
    if not is_mlx(value):
        return np.asarray(value).view(np.uint16)
    memory = memoryview(value)
    if memory.c_contiguous and memory.nbytes > 0:  # an MLX operation costs a hundred times as much
        return np.frombuffer(memory.cast("B"), np.uint16).reshape(memory.shape)
    import mlx.core as mx

    return np.asarray(value.view(mx.uint16))


def stored_numbers(call: str, name: str, value: Any) -> tuple[Array, bool]:
    """``value`` as a numpy array of real numbers, and whether its uint16s are bits of bfloat16s.

    Nothing but a long double is rounded: each dtype stays as it is, in the machine's byte order.
    Raises TypeError for what is no array of real numbers.
    """
    if is_bfloat16(value):
        return _bfloat16_bits(value), True
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"[{call}] {name} must be rows of equal length: {error}") from None
    if array.dtype.kind not in "fiub":
        raise TypeError(f"[{call}] {name} must be real numbers, got dtype {array.dtype}")
    dtype = array.dtype.newbyteorder("=")
    if dtype.kind == "b":
        dtype = np.dtype(np.uint8)
    elif dtype.itemsize > 8:  # long doubles
        dtype = np.dtype(np.float64)
    return array.astype(dtype, copy=False), False


def float32_numbers(call: str, name: str, value: Any) -> npt.NDArray[np.float32]:
    """``value`` as contiguous float32 numbers; errors as ``stored_numbers``."""
    if type(value) is np.ndarray and value.dtype == np.float32:  # the common case, at once
        return np.ascontiguousarray(value)
    array, bfloat16 = stored_numbers(call, name, value)
    if bfloat16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array, np.float32)


def float32_vector(call: str, name: str, value: Any, dim: int) -> npt.NDArray[np.float32]:
    """``float32_numbers`` of a vector of ``dim`` numbers.

    Raises:
        ValueError: It has another shape.
    """
    row = float32_numbers(call, name, value)
    if row.shape != (dim,):
        raise ValueError(f"[{call}] {name} must have shape ({dim},), got {row.shape}")
    return row


def like(result: npt.NDArray[np.float32], template: Any) -> Any:
    """``result`` as an array of ``template``'s kind and, where that is a float, its dtype."""
    if is_mlx(template):
        import mlx.core as mx

        array = mx.array(result)
        return array.astype(template.dtype) if mx.issubdtype(template.dtype, mx.floating) else array
    dtype = getattr(template, "dtype", None)
    if isinstance(dtype, np.dtype) and (dtype.kind == "f" or dtype.name == "bfloat16"):
        return result.astype(dtype, copy=False)
    return result
