"""Saved prompts: what is no file, no list of caches, no metadata."""

from __future__ import annotations

import os
import stat

import mlx.core as mx
import pytest
from kvpool import PoolBackedKVCache, load_prompt_cache, save_prompt_cache
from kvpool.memory.block_pool import BlockPoolAllocator, PoolConfig


def make_pool() -> BlockPoolAllocator:
    return BlockPoolAllocator(PoolConfig(n_blocks=64))


def filled() -> PoolBackedKVCache:
    cache = PoolBackedKVCache(make_pool(), 1)
    cache.update_and_fetch(mx.ones((1, 2, 5, 8)), mx.ones((1, 2, 5, 8)))
    return cache


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=rf"^\[save_prompt_cache\] {pipe} is a device or a pipe"):
        save_prompt_cache(pipe, [filled()])
    with pytest.raises(OSError, match=rf"^\[load_prompt_cache\] {pipe} is a folder, a device"):
        load_prompt_cache(pipe, make_pool())
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_leads_to_what_was_saved(tmp_path):
    link, file = tmp_path / "link", tmp_path / "elsewhere" / "prompt.safetensors"
    file.parent.mkdir()
    link.symlink_to(file)
    save_prompt_cache(link, [filled()])
    assert link.is_symlink() and file.is_file()
    (loaded,) = load_prompt_cache(link, make_pool())
    assert loaded.offset == 5


@pytest.mark.parametrize("name", ["", "."])
def test_a_folder_is_no_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IsADirectoryError, match=r"^\[save_prompt_cache\] \. is a folder"):
        save_prompt_cache(name, [filled()])
    with pytest.raises(OSError, match=r"^\[load_prompt_cache\] \. is a folder"):
        load_prompt_cache(name, make_pool())
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_there_is_named(tmp_path):
    file = tmp_path / "nothing"
    with pytest.raises(FileNotFoundError, match=rf"^\[load_prompt_cache\] {file} is not there"):
        load_prompt_cache(file, make_pool())


@pytest.mark.parametrize("file", [None, 5])
def test_what_is_no_path_is_refused(file):
    with pytest.raises(TypeError, match=r"^\[save_prompt_cache\] file must be a path, got"):
        save_prompt_cache(file, [filled()])
    with pytest.raises(TypeError, match=r"^\[load_prompt_cache\] file must be a path, got"):
        load_prompt_cache(file, make_pool())


def test_one_cache_is_no_list_and_a_list_no_metadata(tmp_path):
    file = tmp_path / "prompt"
    with pytest.raises(TypeError, match=r"^\[save_prompt_cache\] cache must be a list of caches"):
        save_prompt_cache(file, filled())
    with pytest.raises(TypeError, match=r"^\[save_prompt_cache\] metadata must be a mapping"):
        save_prompt_cache(file, [filled()], [1])
    assert not file.exists()
