"""Prepares a known model: download, check, convert, and only then show."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvpool.models.download import Progress, obtain_gguf
from kvpool.models.errors import ModelError
from kvpool.models.specs import spec_for
from kvpool.models.store import is_prepared, model_path, preparing

__all__ = ["fetch"]


def fetch(name: str, *, force: bool = False, progress: Progress | None = None) -> Path:
    """The folder of model `name`, prepared first if it is not there or `force` is set.

    Args:
        name: A key of `KNOWN_MODELS`.
        force: Prepare it anew and replace the folder.
        progress: Called with what is being done, bytes done and bytes in all.

    Raises:
        ModelError: The name is not known, a package that the conversion needs is missing, or the
            download, its check or the conversion failed. The models' folder is as before.
    """
    spec = spec_for(name)
    if is_prepared(spec) and not force:
        return model_path(spec)
    progress = progress or (lambda *_: None)
    _require_modules(name, ("mlx", "tokenizers", *spec.needs))
    with preparing(spec) as scratch:
        gguf = obtain_gguf(spec, scratch, progress)
        progress("converting", spec.download_bytes, spec.download_bytes)
        spec.convert(gguf, scratch / "model")
    return model_path(spec)


def _require_modules(name: str, modules: tuple[str, ...]) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ModelError(
            f"preparing {name} needs {', '.join(missing)}: pip install 'kvpool[cpu,mlx-lm,models]'"
        )
