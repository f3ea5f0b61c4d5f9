"""A prepared model appears whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from kvpool import models
from kvpool.models import ModelError
from kvpool.models.store import preparing

SPEC = models.spec_for("smollm2")


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPOOL_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def prepare(text: str = "weights") -> None:
    with preparing(SPEC) as scratch:
        (scratch / "model" / "weights").write_text(text)


def visible(root):
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


def test_the_environment_names_the_folder(root):
    assert models.models_dir() == root
    assert models.model_path(SPEC) == root / "smollm2"


def test_without_it_models_lie_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("KVPOOL_MODELS")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert models.models_dir() == tmp_path / "cache" / "kvpool" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.models_dir() == tmp_path / ".cache" / "kvpool" / "models"


def test_success_shows_the_folder(root):
    assert not models.is_prepared(SPEC)
    prepare()
    assert models.is_prepared(SPEC)
    assert (root / "smollm2" / "weights").read_text() == "weights"
    assert visible(root) == ["smollm2"]


def test_failure_leaves_nothing(root):
    with pytest.raises(ZeroDivisionError), preparing(SPEC) as scratch:
        (scratch / "model" / "weights").write_text("half of th")
        raise ZeroDivisionError
    assert not models.is_prepared(SPEC)
    assert visible(root) == []


def test_failure_keeps_what_was_there(root):
    prepare("old")
    with pytest.raises(ZeroDivisionError), preparing(SPEC):
        raise ZeroDivisionError
    assert (root / "smollm2" / "weights").read_text() == "old"


def test_preparing_again_replaces_the_folder(root):
    prepare("old")
    prepare("new")
    assert (root / "smollm2" / "weights").read_text() == "new"
    assert visible(root) == ["smollm2"]


def test_a_folder_of_another_file_does_not_count(root):
    prepare()
    receipt = root / "smollm2" / "kvpool.json"
    receipt.write_text(receipt.read_text().replace(SPEC.gguf_sha256, "0" * 64))
    assert not models.is_prepared(SPEC)
    receipt.write_text("{")
    assert not models.is_prepared(SPEC)


_HANGING = """
import sys, time
from kvpool import models
from kvpool.models.store import preparing
with preparing(models.spec_for("smollm2")) as scratch:
    (scratch / "model" / "weights").write_text("half of th")
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def hanging():
    """Another process in the middle of preparing the model."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HANGING], stdout=subprocess.PIPE, env=dict(os.environ), text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_two_processes_do_not_prepare_one_model(hanging):
    with pytest.raises(ModelError, match="another process is preparing smollm2"):
        prepare()


def test_what_a_killed_process_left_goes_with_the_next_one(root, hanging):
    hanging.send_signal(signal.SIGKILL)
    hanging.wait()
    assert not models.is_prepared(SPEC)
    assert len(visible(root)) == 1
    prepare()
    assert visible(root) == ["smollm2"]


def test_a_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVPOOL_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(ModelError, match=r"^cannot write .*; set KVPOOL_MODELS"):
        prepare()
