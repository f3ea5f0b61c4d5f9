"""PoolConfig: how many blocks of how many tokens a pool manages."""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvpool import _native

if TYPE_CHECKING:
    from kvpool.memory._model_sizing import ModelSizing

DEFAULT_BLOCK_SIZE = 16


def checked_int(where: str, name: str, value: object, least: int, most: int = sys.maxsize) -> int:
    """``value`` through ``__index__``; refuses bool, float and what is not in least .. most."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"[{where}] {name} must be an int, got {value!r}") from None
    if number < least:
        raise ValueError(f"[{where}] {name} must be >= {least}, got {number}")
    if number > most:
        raise ValueError(f"[{where}] {name} must be <= {most}, got {number}")
    return number


@dataclass
class PoolConfig:
    """Sizing and behaviour of a ``BlockPoolAllocator``.

    Checked when it is made and again when a pool is built from it. A pool keeps the very object
    (``pool.config is config``), whose fields are fixed from then on: setting one raises
    ``AttributeError``. ``dataclasses.replace`` makes a changed copy for another pool.

    Attributes:
        block_size: Token slots in a block, >= 1.
        n_blocks: Blocks managed at the start over all streams, >= 1. With ``separate_kv`` keys get
            the odd one.
        separate_kv: Keys and values draw on free lists of their own; otherwise one list backs both.
        grow_on_exhaustion: An allocation that would run out mints the missing blocks instead.
        max_blocks: Upper bound on managed blocks over all streams; None for no bound. At least
            ``n_blocks`` where the pool may grow, and not looked at otherwise.

    Raises:
        TypeError: A field is of another type; bool and float are no ints here.
        ValueError: A field is out of range.
    """

    block_size: int = DEFAULT_BLOCK_SIZE
    n_blocks: int = 1024
    separate_kv: bool = True
    grow_on_exhaustion: bool = False
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        self._check()

    def __setattr__(self, name: str, value: Any) -> None:
        if "_in_use" in self.__dict__ and name in _FIELDS:
            raise AttributeError(
                f"[PoolConfig] {name} cannot change once a pool uses the config; make another with "
                f"dataclasses.replace(config, {name}={value!r})"
            )
        object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        """A copy belongs to no pool."""
        return {name: value for name, value in self.__dict__.items() if name != "_in_use"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _check(self) -> None:
        ints = {
            name: checked_int("PoolConfig", name, getattr(self, name), 1, most)
            for name, most in (
                ("block_size", _native.MAX_BLOCK_SIZE),
                ("n_blocks", _native.MAX_BLOCKS),
            )
        }
        for name in ("separate_kv", "grow_on_exhaustion"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"[PoolConfig] {name} must be a bool, got {getattr(self, name)!r}")
        if self.max_blocks is not None:
            most = checked_int("PoolConfig", "max_blocks", self.max_blocks, 1)
            if self.grow_on_exhaustion and most < ints["n_blocks"]:
                raise ValueError(
                    f"[PoolConfig] max_blocks must be >= n_blocks ({ints['n_blocks']}), got {most}"
                )
            ints["max_blocks"] = most
        if "_in_use" not in self.__dict__:
            self.__dict__.update(ints)

    def _adopt(self) -> None:
        """Fixes the fields: a pool has been built from them."""
        self.__dict__["_in_use"] = True

    def tokens_for(self, n_layers: int, n_sequences: int = 1) -> int:
        """Tokens that each of ``n_sequences`` sequences can keep in ``n_layers`` plain layers.

        Every layer takes blocks of its own, for keys and for values:
        ``PoolConfig(n_blocks=4096).tokens_for(28)`` is 1168. Growth is not counted.

        Raises:
            TypeError: An argument is no int.
            ValueError: An argument is below 1.
        """
        layers = checked_int("PoolConfig::tokens_for", "n_layers", n_layers, 1)
        sequences = checked_int("PoolConfig::tokens_for", "n_sequences", n_sequences, 1)
        return self.n_blocks // 2 // (layers * sequences) * self.block_size

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        memory: str | int | None = None,
        max_tokens: int | None = None,
        n_sequences: int = 1,
        block_size: int = DEFAULT_BLOCK_SIZE,
        prefill_step: int = 2048,
        separate_kv: bool = True,
        grow_on_exhaustion: bool = False,
        max_blocks: int | None = None,
        paged: bool = False,
        format: str = "auto",
    ) -> PoolConfig:
        """A pool for an mlx-lm model, by a budget of bytes or by the tokens it has to hold.

        Counts the layers that ``build_pooled_caches`` pools, keys and values each: plain ones by
        the tokens, sliding windows by at most ``window + prefill_step - 1`` rows. The result's
        ``sizing`` tells what came out (``print(config.sizing)``).

        Args:
            model: A model as ``mlx_lm.load`` returns it. Nothing is computed: an MLX model is asked
                for one token's keys and values, whose shapes and types are known unevaluated; any
                other object needs ``layers`` (or ``make_cache``) and ``args``.
            memory: Bytes of keys and values that all sequences may take together: an int, or a
                string like ``"512MB"``, ``"4GB"`` (10**9 bytes) or ``"4GiB"`` (2**30).
            max_tokens: Instead of ``memory``: tokens that each sequence has to keep.
            n_sequences: Sequences held at one time.
            block_size: Token slots in a block.
            prefill_step: The longest chunk fed at once; mlx-lm's default.
            separate_kv: As in ``PoolConfig``.
            grow_on_exhaustion: As in ``PoolConfig``.
            max_blocks: As in ``PoolConfig``.
            paged: For ``build_paged_caches``, whose windows hold whole blocks: up to two more.
            format: What the pages of paged caches hold, as ``build_paged_caches`` is told: bytes
                are those of "int8/int4", say, with their scales. "auto": as the model makes them.

        Raises:
            TypeError: Neither or both of ``memory`` and ``max_tokens``, or another type.
            ValueError: An argument out of range, too little memory for one block in each layer, or
                a model without a layer to pool or without the sizes of its keys and values.
        """
        from kvpool.memory._model_sizing import size_for_model

        sizing = size_for_model(
            model,
            memory=memory,
            max_tokens=max_tokens,
            n_sequences=checked_int("PoolConfig::for_model", "n_sequences", n_sequences, 1),
            block_size=checked_int("PoolConfig::for_model", "block_size", block_size, 1),
            prefill_step=checked_int("PoolConfig::for_model", "prefill_step", prefill_step, 1),
            paged=paged,
            format=format,
        )
        config = cls(
            block_size=block_size,
            n_blocks=sizing.n_blocks,
            separate_kv=separate_kv,
            grow_on_exhaustion=grow_on_exhaustion,
            max_blocks=max_blocks,
        )
        config.__dict__["_sizing"] = sizing
        return config

    @property
    def sizing(self) -> ModelSizing | None:
        """What ``for_model`` worked out; None for a config made another way."""
        return self.__dict__.get("_sizing")


_FIELDS = frozenset(field.name for field in fields(PoolConfig))
