"""Files of saved prompts: a tree of arrays and plain values in safetensors, with checksums.

The metadata holds a record (JSON) under ``kvpool`` and its checksum under ``kvpool.checksum``. The
record has the tree, and the type, shape and checksum of every array, so that no byte that means
something can change unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from kvpool.core.exceptions import PromptCacheError

_VERSION = 1
_RECORD, _CHECKSUM = "kvpool", "kvpool.checksum"


def encode(tree: Any, arrays: dict[str, mx.array]) -> Any:
    """``tree`` as JSON can hold it; its arrays are put into ``arrays``.

    Raises:
        TypeError: There is something else in it than arrays, lists, tuples and plain values.
    """
    if isinstance(tree, mx.array):
        name = str(len(arrays))
        arrays[name] = tree
        return {"array": name}
    if isinstance(tree, (list, tuple)):
        items = [encode(item, arrays) for item in tree]
        return {"tuple": items} if isinstance(tree, tuple) else items
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    raise TypeError(f"{type(tree).__name__} cannot be saved")


def decode(tree: Any, arrays: Mapping[str, mx.array]) -> Any:
    """Takes ``encode`` back."""
    if isinstance(tree, list):
        return [decode(item, arrays) for item in tree]
    if isinstance(tree, dict):
        ((kind, content),) = tree.items()
        if kind == "array":
            return arrays[content]
        if kind == "tuple":
            return tuple(decode(item, arrays) for item in content)
        raise ValueError(f"unknown kind {kind!r}")
    return tree


def write(path: Path, record: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> None:
    """Writes a file at once: whoever reads ``path`` sees the old file or the whole new one.

    Raises:
        OSError: It cannot be written; what was at ``path`` is as before.
    """
    if path.is_dir():
        raise IsADirectoryError(f"[save_prompt_cache] {path} is a folder")
    if path.exists() and not path.is_file():
        raise OSError(
            f"[save_prompt_cache] {path} is a device or a pipe, which a file would replace"
        )
    path = path.resolve()  # a link goes on leading to the file
    whole = {name: mx.contiguous(array) for name, array in arrays.items()}
    described = {name: _describe(array) for name, array in whole.items()}
    text = json.dumps({"version": _VERSION, "arrays": described, **record})
    # Beside the file, for a rename to be atomic. mx.save_safetensors wants the ending.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.safetensors")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"[save_prompt_cache] there is no folder {path.parent}")
    try:
        metadata = {_RECORD: text, _CHECKSUM: _digest(text.encode())}
        mx.save_safetensors(str(draft), whole, metadata)
        with draft.open("rb+") as written:
            os.fsync(written.fileno())
        draft.replace(path)
    except RuntimeError as error:  # MLX's way to say that it cannot write
        raise OSError(f"[save_prompt_cache] cannot write {path}: {error}") from error
    finally:
        draft.unlink(missing_ok=True)


def read(path: Path) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """The record and the arrays of a file, as they were written.

    Raises:
        PromptCacheError: The file is damaged or something else.
        OSError: It cannot be read.
    """
    where = f"[load_prompt_cache] {path}"
    if not path.exists():
        raise FileNotFoundError(f"{where} is not there")
    if not path.is_file():
        raise OSError(f"{where} is a folder, a device or a pipe")
    try:
        # safetensors checks every length and place in the header before MLX follows them.
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise PromptCacheError(f"{where} is damaged or no safetensors file: {error}") from error
    text = metadata.get(_RECORD)
    if text is None:
        raise PromptCacheError(f"{where} was not saved by kvpool.save_prompt_cache")
    if metadata.get(_CHECKSUM) != _digest(text.encode()):
        raise PromptCacheError(f"{where} is damaged: the checksum of its record differs")
    try:
        record = json.loads(text)
        version, described = record["version"], record["arrays"]
        if version != _VERSION:
            raise PromptCacheError(f"{where} has version {version!r}, this kvpool reads {_VERSION}")
        arrays: Any = mx.load(str(path), format="safetensors")
        if described.keys() != arrays.keys():
            raise PromptCacheError(f"{where} is damaged: it has other arrays than it should")
        for name, array in arrays.items():
            if _describe(array) != described[name]:
                raise PromptCacheError(f"{where} is damaged: the checksum of array {name} differs")
    except PromptCacheError:
        raise
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise PromptCacheError(f"{where} is damaged: {error!r}") from error
    return record, arrays


def _describe(array: mx.array) -> list[Any]:
    """Type, shape and checksum of an array."""
    flat: Any = array.reshape(-1)
    data = memoryview(flat.view(mx.uint8)) if array.size else b""
    return [type_name(array), list(array.shape), _digest(data)]


def type_name(array: mx.array) -> str:
    """The type of an array's numbers, as "float16"."""
    return str(array.dtype).removeprefix("mlx.core.")


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
