"""The image's kernels as files: no Triton needed. What Triton makes of them: tests/compiled."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from sparkpin_modkit.kernels import Listener, Seen, entries, lead


def put(folder: Path, key: str, files: tuple[str, ...] = ("head.cubin", "head.json"), arch: int = 121) -> Path:
    """An entry as Triton 3.8.0 writes it, without what nobody here reads."""
    entry = folder / key
    entry.mkdir(parents=True)
    (entry / "head.cubin").write_bytes(b"cubin")
    (entry / "head.json").write_text(json.dumps({"name": "head", "target": {"backend": "cuda", "arch": arch}}))
    group = {"child_paths": {name: str(entry / name) for name in files}}
    (entry / "__grp__head.json").write_text(json.dumps(group))
    return entry


def test_the_cache_leads_to_the_image(tmp_path: Path) -> None:
    image, cache = tmp_path / "image", tmp_path / "volume/triton"
    entry = put(image, "KEY")
    lead(image, cache)
    assert [path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file()] == [
        "KEY/__grp__head.json"
    ]
    assert (cache / "KEY/__grp__head.json").read_bytes() == (entry / "__grp__head.json").read_bytes()


def test_an_entry_that_was_compiled_before_gives_way(tmp_path: Path) -> None:
    image, cache = tmp_path / "image", tmp_path / "cache"
    entry, old, other = put(image, "KEY"), put(cache, "KEY"), put(cache, "OTHER")
    lead(image, cache)
    lead(image, cache)
    assert (old / "__grp__head.json").read_bytes() == (entry / "__grp__head.json").read_bytes()
    assert str(other) in (other / "__grp__head.json").read_text()


def test_a_kernel_without_files_is_not_the_image_s(tmp_path: Path) -> None:
    listener, seen = Listener(None), Seen()
    listener.warming = seen, tmp_path
    for files in ({}, {"head.cubin": str(tmp_path / "KEY/head.cubin")}, {"head.cubin": "/elsewhere/head.cubin"}):
        listener(src=SimpleNamespace(name=f"head{len(files)}"), cache_hit=True, metadata_group=files)
    assert (seen.image, seen.cached, seen.compiled) == (["head1"], ["head0", "head1"], [])


def test_an_image_without_kernels_writes_nothing(tmp_path: Path) -> None:
    lead(tmp_path / "image", tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


def test_entries_in_the_order_of_their_keys(tmp_path: Path) -> None:
    for key, arch in (("B", 121), ("A", 90)):
        put(tmp_path, key, arch=arch)
    (tmp_path / "kernels.json").write_text("{}")
    assert entries(tmp_path) == [
        {"name": "head", "key": "A", "arch": 90},
        {"name": "head", "key": "B", "arch": 121},
    ]


def test_an_entry_that_triton_would_not_find(tmp_path: Path) -> None:
    entry = put(tmp_path / "one", "KEY")
    (entry / "head.cubin").unlink()
    with pytest.raises(ValueError, match=r"__grp__head\.json names .*head\.cubin, expected files beside it"):
        entries(tmp_path / "one")
    put(tmp_path / "three", "KEY", files=("head.cubin",))
    with pytest.raises(ValueError, match="names 0 files with what Triton knows of the kernel, expected 1"):
        entries(tmp_path / "three")
    moved = put(tmp_path / "elsewhere", "KEY").rename(tmp_path / "KEY")
    with pytest.raises(ValueError, match="expected files beside it"):
        entries(moved.parent)
    (put(tmp_path / "two", "KEY") / "__grp__head.json").unlink()
    with pytest.raises(ValueError, match="0 lists of files, expected 1"):
        entries(tmp_path / "two")


def test_cubins_that_are_not_triton_s(tmp_path: Path) -> None:
    elf = bytearray(b"\x7fELF" + bytes(60))
    for name, abi, flags in (("attend-b", 8, 0x6007902), ("attend-a", 7, 0x5A055A)):  # of CUDA 13.0 and 12.8
        elf[8], elf[48:52] = abi, flags.to_bytes(4, "little")
        (tmp_path / f"{name}.cubin").write_bytes(elf)
    assert entries(tmp_path) == [
        {"name": "attend", "key": "a", "arch": 90},
        {"name": "attend", "key": "b", "arch": 121},
    ]
    (tmp_path / "attend-c.cubin").write_bytes(b"#define")
    with pytest.raises(ValueError, match=r"attend-c\.cubin is no cubin"):
        entries(tmp_path)
