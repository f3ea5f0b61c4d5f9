"""Where prepared models are kept, and how a folder appears there whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvpool.models.errors import ModelError
from kvpool.models.specs import ModelSpec

__all__ = ["is_prepared", "model_path", "models_dir", "preparing"]

# Raised when the converters change what they write, so that older folders are prepared anew.
LAYOUT_VERSION = 1

_RECEIPT = "kvpool.json"


def models_dir() -> Path:
    """`$KVPOOL_MODELS`, or `kvpool/models` under the platform's cache folder."""
    if configured := os.environ.get("KVPOOL_MODELS"):
        return Path(configured).expanduser()
    if sys.platform == "darwin":
        cache = Path.home() / "Library" / "Caches"
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvpool" / "models"


def model_path(spec: ModelSpec) -> Path:
    """The folder of a model, whether or not it is prepared."""
    return models_dir() / spec.name


def is_prepared(spec: ModelSpec) -> bool:
    """Whether the folder is there and was written from the pinned file by this layout."""
    try:
        receipt = json.loads((model_path(spec) / _RECEIPT).read_text())
    except (OSError, ValueError):
        return False
    return bool(receipt == _receipt(spec))


@contextlib.contextmanager
def preparing(spec: ModelSpec) -> Iterator[Path]:
    """A scratch folder beside the models; its `model` sub-folder becomes the model's on success.

    One process prepares a model at a time. The scratch folder goes on any exit; one that a killed
    process left behind goes when the next one starts.

    Raises:
        ModelError: the models' folder cannot be written, or another process prepares this model.
    """
    root = models_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / f".{spec.name}.lock", "w")  # noqa: SIM115, closed below
    except OSError as error:
        raise ModelError(f"cannot write {root}: {error.strerror}; set KVPOOL_MODELS") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ModelError(f"another process is preparing {spec.name} in {root}") from None
        prefix = f".{spec.name}-"
        for left_behind in root.glob(prefix + "*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        try:
            (scratch / "model").mkdir()
            yield scratch
            _install(spec, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _install(spec: ModelSpec, scratch: Path) -> None:
    # The receipt is written last: a folder without it does not count as prepared.
    (scratch / "model" / _RECEIPT).write_text(json.dumps(_receipt(spec), indent=2) + "\n")
    target = model_path(spec)
    if target.exists():
        target.rename(scratch / "replaced")
    (scratch / "model").rename(target)


def _receipt(spec: ModelSpec) -> dict[str, object]:
    return {"model": spec.name, "gguf_sha256": spec.gguf_sha256, "layout": LAYOUT_VERSION}
