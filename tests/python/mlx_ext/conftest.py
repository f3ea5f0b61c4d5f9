"""The fixture `backend`: a test that takes it holds for pages wherever they may lie."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest
from page_backends import NAMES, Backend, find


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each backend that is here, its device MLX's default one."""
    before = mx.default_device()
    found = find(request.param)
    mx.set_default_device(found.device)
    try:
        yield found
    finally:
        mx.set_default_device(before)
