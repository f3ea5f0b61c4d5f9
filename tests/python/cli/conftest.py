from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model."""
    from tiny_folder import write_tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder
