"""The attention hook: mlx-lm's models attend over paged caches where their tokens lie.

Models import ``scaled_dot_product_attention`` from ``mlx_lm.models.base`` by name, so a new
attribute of that module would not reach them. The hook replaces the code of that one function
object instead: every model calls it, in whatever order things were imported.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from types import CodeType, FunctionType
from typing import Any

import mlx.core as mx

from kvpool.core.exceptions import AttentionHookError
from kvpool.mlx_lm.paged import _counts

__all__ = ["attention", "install_attention", "is_attention_installed", "uninstall_attention"]

#: Versions of mlx-lm whose attention is known to mean what ours does.
SUPPORTED_MLX_LM = ("0.32.2",)

#: Models of mlx-lm that attend without the function that the hook replaces, and how.
BYPASSING_MODELS = {
    "deepseek_v41": "picks rows by index and calls mx.fast itself",
    "gear": "softcaps the scores itself, where attn_logit_softcapping is set",
    "gemma2": "softcaps the scores itself",
    "olmo": "takes the softmax itself",
    "phi3small": "block-sparse layers take the softmax themselves; dense ones are reached",
    "plamo2": "calls mx.fast itself",
}

_PARAMETERS = "(queries, keys, values, cache, scale, mask, sinks=None)"


class _Hook:
    """Whether the function is replaced, and who wants it.

    States: stock (nobody wants it), replaced (installed, or inside ``attention()``, or both). The
    function's code changes with the state, under the lock, and nowhere else.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.installed = False
        self.n_contexts = 0
        self.stock_code: CodeType | None = None

    def wanted(self) -> bool:
        return self.installed or self.n_contexts > 0

    def settle(self, call: str) -> None:
        """Brings the function's code in line with who wants it; call it under the lock."""
        if self.stock_code is not None:
            function = _base_attention()
            if function.__code__ is not _replacement.__code__:
                raise AttentionHookError(
                    f"[{call}] mlx-lm's attention was replaced by something else since: take that "
                    "back first"
                )
            if not self.wanted():
                function.__code__, self.stock_code = self.stock_code, None
        elif self.wanted():
            function = _stock_function(call)
            self.stock_code = function.__code__
            function.__code__ = _replacement.__code__


_hook = _Hook()


def _renew_lock() -> None:
    _hook.lock = threading.RLock()  # another thread may have held it when the process forked


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def install_attention() -> None:
    """Lets every model of mlx-lm attend over paged caches with kvpool's kernels.

    Holds for the process, in all threads, until ``uninstall_attention``; installing twice is the
    same as once. The kernels answer for keys and values that come from a ``PagedKVCache`` alone;
    all other calls, and what the kernels do not cover, go to mlx-lm's own code, and
    ``attention_stats`` counts them. ``BYPASSING_MODELS`` names the models that do not use the
    function.

    Raises:
        AttentionHookError: mlx-lm is of a version that is not supported, or its attention is
            another function than it was in that version.
    """
    with _hook.lock:
        before, _hook.installed = _hook.installed, True
        try:
            _hook.settle("install_attention")
        except BaseException:
            _hook.installed = before
            raise


def uninstall_attention() -> None:
    """Takes ``install_attention`` back; inside ``attention()`` the hook stays to the block's end.

    Raises:
        AttentionHookError: Something else has replaced the function since.
    """
    with _hook.lock:
        before, _hook.installed = _hook.installed, False
        try:
            _hook.settle("uninstall_attention")
        except BaseException:
            _hook.installed = before
            raise


@contextmanager
def attention() -> Iterator[None]:
    """``install_attention`` for the time of a ``with`` block.

    Blocks may be nested and may overlap between threads: the last one to end takes the hook away,
    unless ``install_attention`` asked for it, too. It works for the whole process meanwhile.

    Raises:
        AttentionHookError: As ``install_attention`` and ``uninstall_attention`` do.
    """
    with _hook.lock:
        _hook.n_contexts += 1
        try:
            _hook.settle("attention")
        except BaseException:
            _hook.n_contexts -= 1
            raise
    try:
        yield
    finally:
        with _hook.lock:
            _hook.n_contexts -= 1
            _hook.settle("attention")


def is_attention_installed() -> bool:
    """Whether calls of mlx-lm's attention come by here now."""
    return _hook.stock_code is not None


# --- the function in mlx-lm -----------------------------------------------------------------------


def _base_attention() -> FunctionType:
    from mlx_lm.models import base

    function: FunctionType = base.scaled_dot_product_attention
    return function


def _stock_function(call: str) -> FunctionType:
    """mlx-lm's function, where it is the one that we know."""
    try:
        version = metadata.version("mlx-lm")
    except metadata.PackageNotFoundError:
        version = "none"
    if version not in SUPPORTED_MLX_LM:
        raise AttentionHookError(
            f"[{call}] mlx-lm must be {' or '.join(SUPPORTED_MLX_LM)}, got {version}"
        )
    function = _base_attention()
    name = "mlx_lm.models.base.scaled_dot_product_attention"
    if not isinstance(function, FunctionType) or function.__closure__:
        raise AttentionHookError(f"[{call}] {name} must be a plain function, got {function!r}")
    parameters = inspect.signature(function).parameters.values()
    found = ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters)
    if f"({found})" != _PARAMETERS:
        raise AttentionHookError(f"[{call}] {name} must take {_PARAMETERS}, got ({found})")
    return function


def _replacement(queries, keys, values, cache, scale, mask, sinks=None):  # type: ignore[no-untyped-def]
    # Runs as mlx-lm's function, so it sees that module's names and none of these.
    from kvpool.mlx_lm.paged.hook import _attend

    return _attend(queries, keys, values, cache, scale, mask, sinks)


def _attend(
    queries: Any, keys: Any, values: Any, cache: Any, scale: Any, mask: Any, sinks: Any
) -> Any:
    """Attention by the kernels where they can answer, by mlx-lm's code elsewhere."""
    native = sys.modules.get("kvpool._mlx")
    # Without the extension no paged cache was ever made; quantised keys of mlx-lm are tuples.
    if native is None or not isinstance(keys, mx.array):
        _counts.count_not_ours()
    else:
        answer = native.attend(queries, keys, values, scale, mask, sinks)
        if answer is None:
            _counts.count_not_ours()
        elif isinstance(answer, str):
            _counts.count_fallback(answer)
        else:
            _counts.count_kernel()
            return answer
    return _stock()(queries, keys, values, cache, scale, mask, sinks)


def _stock() -> FunctionType:
    """mlx-lm's function as it is without the hook."""
    function = _base_attention()
    code = _hook.stock_code
    if code is None:  # the hook went while this call was on its way
        return function
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
