"""KVCacheConfig: a quantisation method and its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.cache.methods import METHODS
from kvpool.core.exceptions import QuantizerConfigError
from kvpool.memory._config import checked_int

__all__ = ["KVCacheConfig"]


@dataclass
class KVCacheConfig:
    """What ``KVCacheFactory.create`` makes a cache from.

    Nothing is checked here but by the factory, so fields may be set one after another. ``kvpool
    methods`` and ``kvpool.cache.METHODS`` say which method reads which field.

    Attributes:
        method: A name in ``kvpool.cache.METHODS``, or a ``Method``.
        head_dim: Numbers in a key and in a value, 1..1024; a multiple of 16 for polar.
        bit_width_inlier: Bits of a key coordinate, 1..8 (of both streams for kivi and spectral).
        bit_width_outlier: Only None.
        jl_dim: Signs of a sketch, >= 1 (qjl, turboquant_prod); None: as many as head_dim.
        n_outlier_channels: Key channels of each head kept apart as int8, with
            ``enable_outlier_two_stream``: those of the largest mean magnitude.
        n_calib_tokens: Tokens after which those channels are chosen; until then tokens stay exact.
            None: 200.
        enable_vectorized_attend: Nothing: attention always runs on the packed codes.
        enable_outlier_two_stream: See ``n_outlier_channels``; for every method but kivi.
        enable_fused_query_dot: Nothing, as ``enable_vectorized_attend``.
        seed: Of the random rotations and projections.
        dtype: What exact tokens are kept in: "fp16", "bf16", "fp32" or a numpy or MLX dtype. None:
            fp16, or bf16 where the first token is.
        capacity: Most tokens held, the oldest go first. None or 0: no limit.
        sliding_window: The same: the smaller of the two counts.
        store: Only None: kvpool reads no artifacts.
        observers: Only empty.
        options: Only None: every parameter is a field.
        residual_length: Newest tokens that kivi keeps exact.
        kivi_group_size: Tokens of a group of keys, >= 1.
        spectral_key_d_eff: Signal coordinates of a key, without calibration.
        spectral_val_d_eff: Signal coordinates of a value, without calibration.
        spectral_apply_qjl: Spectral keys keep a sign sketch of the signal's error.
        spectral_model_name: Nothing: calibration is given to the cache itself.
        use_metal_kernels: Nothing.
        value_bits: Bits of a value, 1..8: 8 is int8 with a scale a token, fewer are rotated and
            rounded to Lloyd-Max levels. None: 8; for kivi ``bit_width_inlier``.
        exact_window: Newest tokens kept exact, for any method. None: the method's own choice.
        polar_level_bits: Bits of polar's four levels of angles. None: from ``bit_width_inlier``.
        unbiased_scores: Keys are scaled so that scores keep their size instead of shrinking by the
            codes' error. None: from 3 bits on.
        as_published: Every choice as published, where kvpool's own is better.
    """

    method: str = "turboquant_mse"
    head_dim: int = 128
    bit_width_inlier: int = 2
    bit_width_outlier: int | None = None
    jl_dim: int | None = None
    n_outlier_channels: int | None = None
    n_calib_tokens: int | None = None
    enable_vectorized_attend: bool = True
    enable_outlier_two_stream: bool = False
    enable_fused_query_dot: bool = False
    seed: int = 42
    dtype: Any = None
    capacity: int | None = None
    sliding_window: int | None = None
    store: Any = None
    observers: Sequence[Any] = field(default_factory=list)
    options: Any = None
    residual_length: int = 128
    kivi_group_size: int = 32
    spectral_key_d_eff: int = 4
    spectral_val_d_eff: int = 50
    spectral_apply_qjl: bool = True
    spectral_model_name: str = "model"
    use_metal_kernels: bool | None = None
    value_bits: int | None = None
    exact_window: int | None = None
    polar_level_bits: Sequence[int] | None = None
    unbiased_scores: bool | None = None
    as_published: bool = False


DEFAULT_CALIBRATION_TOKENS = 200

_PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def precision_of(dtype: Any) -> str | None:
    """ "fp16" for "fp16", "float16", mx.float16 or numpy.float16, and so on; None for None."""
    if dtype is None:
        return None
    name = (getattr(dtype, "__name__", None) or str(dtype)).rpartition(".")[2]
    return _PRECISIONS.get(name, name)


def _integer(name: str, value: object, least: int = -(2**63)) -> int:
    try:
        number = checked_int("KVCacheConfig", name, value, least)
    except (TypeError, ValueError) as error:
        raise QuantizerConfigError(str(error)) from None
    if number >= 2**63:
        raise QuantizerConfigError(f"[KVCacheConfig] {name} must be < 2**63, got {number}")
    return number


def _optional(name: str, value: object) -> int | None:
    return None if value is None else _integer(name, value)


def _capacity_of(config: KVCacheConfig) -> int | None:
    limits = []
    for name in ("capacity", "sliding_window"):
        value = _optional(name, getattr(config, name))
        if value:
            limits.append(_integer(name, value, 1))
    return min(limits, default=None)


def _refuse(config: KVCacheConfig) -> None:
    for name, why in (
        ("bit_width_outlier", "kvpool has no second width"),
        ("store", "kvpool reads no artifacts"),
        ("observers", "kvpool's caches notify nobody"),
        ("options", "every parameter is a field of the config"),
    ):
        value = getattr(config, name)
        if value is not None and value != []:
            raise QuantizerConfigError(
                f"[KVCacheConfig] {name} must be left empty ({why}), got {value!r}"
            )
    if isinstance(config.bit_width_inlier, (list, tuple)):
        raise QuantizerConfigError(
            "[KVCacheConfig] bit_width_inlier must be one int for all channels, "
            f"got {config.bit_width_inlier!r}"
        )


def native_arguments(config: KVCacheConfig) -> dict[str, Any]:
    """Keyword arguments of ``_native.Method``, of the right types; ranges are checked there."""
    _refuse(config)
    method = str(getattr(config.method, "value", config.method))
    residual = config.exact_window
    if residual is None and method in METHODS and METHODS[method].default_residual_length > 0:
        residual = config.residual_length
    n_calib = DEFAULT_CALIBRATION_TOKENS if config.n_calib_tokens is None else config.n_calib_tokens
    n_outliers = 0
    if config.enable_outlier_two_stream:
        if config.n_outlier_channels is None:
            raise QuantizerConfigError(
                "[KVCacheConfig] enable_outlier_two_stream needs n_outlier_channels, got None"
            )
        n_outliers = _integer("n_outlier_channels", config.n_outlier_channels)
    levels = config.polar_level_bits
    if levels is not None:
        levels = [_integer("polar_level_bits", bits) for bits in levels]
        if len(levels) != 4:
            raise QuantizerConfigError(
                f"[KVCacheConfig] polar_level_bits must be 4 ints, got {len(levels)}"
            )
    return {
        "method": method,
        "head_dim": _integer("head_dim", config.head_dim),
        "bit_width_inlier": _integer("bit_width_inlier", config.bit_width_inlier),
        "value_bits": _optional("value_bits", config.value_bits),
        "jl_dim": _optional("jl_dim", config.jl_dim),
        "seed": _integer("seed", config.seed),
        "capacity": _capacity_of(config),
        "residual_length": _optional("residual_length", residual),
        "precision": precision_of(config.dtype) or "fp16",
        "n_outlier_channels": n_outliers,
        "n_calib_tokens": _integer("n_calib_tokens", n_calib),
        "kivi_group_size": _integer("kivi_group_size", config.kivi_group_size),
        "spectral_key_d_eff": _integer("spectral_key_d_eff", config.spectral_key_d_eff),
        "spectral_val_d_eff": _integer("spectral_val_d_eff", config.spectral_val_d_eff),
        "spectral_apply_qjl": bool(config.spectral_apply_qjl),
        "polar_level_bits": levels,
        "unbiased_scores": config.unbiased_scores,
        "as_published": bool(config.as_published),
    }
