"""Models that the project holds, each as an archive of its repositories with every file of them.

benchmarks/scripted_tiny makes the archives.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparkpin.checkpoint.repository import CONFIG
from sparkpin.core.errors import IntegrityError
from sparkpin.core.files import git_blob_sha1, sha256_file
from sparkpin.core.paths import project_folder
from sparkpin.fetch.hub import Listed
from sparkpin.pins.schema import Packed


def unpack(project: Path, packed: Packed, out: Path) -> None:
    """Write the repositories of a pin below `out`, each in a folder of its Hub id. IntegrityError for bytes that are
    not the pinned ones."""
    with tarfile.open(fileobj=io.BytesIO(pinned(project, packed))) as archive:
        # Python 3.11.2, which Debian 12 has, knows no filter, nor an argument for one; the bytes are the pinned ones.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(out)


def config_ahead(project: Path, packed: Packed, repo: str) -> dict[str, Any] | None:
    """config.json of a repository before it is unpacked."""
    with tarfile.open(fileobj=io.BytesIO(pinned(project, packed)), mode="r|xz") as archive:
        for member in archive:  # the small files are its first
            if member.name == f"{repo}/{CONFIG}" and (file := archive.extractfile(member)):
                return dict(json.load(file))
    return None


def pinned(project: Path, packed: Packed) -> bytes:
    """The archive's bytes. They lie in this checkout where `project` is laid out of a release's kept inputs: those hold
    no weights."""
    path = project / packed.path
    path = path if path.exists() else project_folder() / packed.path
    data = path.read_bytes() if path.is_file() else b""
    if (got := hashlib.sha256(data).hexdigest()) != packed.sha256:
        cause = f"{path}: got SHA-256 {got} of {len(data)} bytes, expected {packed.sha256}"
        step = f"git restore {packed.path}; for new weights, set packed.sha256 in their pin"
        raise IntegrityError(cause, next_step=step)
    return data


def files_of(folder: Path) -> Iterator[Listed]:
    """What a Hub lists of a repository's files: SHA-256 of a large file, "" of another."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sha256 = sha256_file(path)[0] if path.suffix == ".safetensors" else ""
        yield Listed(path.relative_to(folder).as_posix(), path.stat().st_size, sha256)


def commit_of(folder: Path) -> str:
    """40 hexadecimal digits that follow from the files, as a Hub's commit. git stores a pointer to a large file."""
    text = ""
    for name, size, sha256 in files_of(folder):
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
        text += f"{git_blob_sha1(pointer.encode() if sha256 else (folder / name).read_bytes())} {name}\n"
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
