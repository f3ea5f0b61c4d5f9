"""The error of everything that prepares a model."""

__all__ = ["ModelError"]


class ModelError(RuntimeError):
    """A model could not be found, downloaded, checked or converted; the message says what to do."""
