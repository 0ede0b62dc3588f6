"""The files of an image as a container sees them: from folders that lie over each other, or from one archive."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import posixpath
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

from sparkpin.core.errors import InspectionError
from sparkpin.core.files import Joined

DEPTH = 128  # folders in a path
FOLLOWED = 40  # links in a path, as the kernel follows them
IN_MEMORY = 1 << 26  # bytes of a file from an archive; a larger one goes to the disk while it is read
OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")


@dataclass(frozen=True)
class FoundPath:
    """A file or link."""

    path: str  # without a slash in front
    size: int = 0
    mode: int = 0
    link: str = ""  # its target, as it stands
    open: Callable[[], BinaryIO] = io.BytesIO  # the content, until the next file is asked for


def in_folders(layers: Sequence[Path], below: str = "", depth: int = 0) -> Iterator[FoundPath]:
    """The regular files and links of a folder, or of overlay's folders that lie over each other, the highest first."""
    if depth > DEPTH:
        raise InspectionError(f"{below}: more than {DEPTH} folders deep", next_step="inspect the folder below it")
    seen: dict[str, list[os.DirEntry[str]]] = {}
    for layer in layers:
        try:
            with os.scandir(layer) as listing:
                for entry in listing:
                    seen.setdefault(entry.name, []).append(entry)
        except OSError as error:
            raise InspectionError(f"{layer}: {error.strerror}", next_step="run as the owner of the files") from None
        if is_opaque(layer):
            break
    for name, entries in sorted(seen.items()):
        top, path = entries[0], f"{below}{name}"
        if top.is_symlink():
            yield FoundPath(path, link=os.readlink(top.path))
        elif top.is_dir(follow_symlinks=False):
            folders = []
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    break  # a file or a deletion mark hides all below it
                folders.append(Path(entry.path))
            yield from in_folders(folders, f"{path}/", depth + 1)
        elif top.is_file(follow_symlinks=False):
            about = top.stat(follow_symlinks=False)
            yield FoundPath(
                path, about.st_size, stat.S_IMODE(about.st_mode), open=functools.partial(io.FileIO, top.path)
            )


def is_opaque(folder: Path) -> bool:
    for name in OPAQUE:
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name) == b"y":
                return True
    return False


def in_archive(chunks: Iterable[bytes], work: Path) -> Iterator[FoundPath]:
    """The same of an archive that comes in pieces, such as `docker export` gives. work: folder for large files."""
    try:
        with tarfile.open(fileobj=Joined(chunks), mode="r:") as tar:
            for member in tar:
                path = posixpath.normpath(member.name).lstrip("/")
                if member.issym():
                    yield FoundPath(path, link=member.linkname)
                elif member.islnk():
                    yield FoundPath(path, link="/" + posixpath.normpath(member.linkname).lstrip("/"))
                elif member.isreg():
                    content = functools.partial(spooled, tar, member, work)
                    yield FoundPath(path, member.size, member.mode, open=content)
    except (tarfile.TarError, EOFError) as error:
        raise InspectionError(f"the archive cannot be read: {error}", next_step="run the same command again") from None


def spooled(tar: tarfile.TarFile, member: tarfile.TarInfo, work: Path) -> BinaryIO:
    """A copy of a member's data, to go back and forth in."""
    file: IO[bytes] = tempfile.SpooledTemporaryFile(IN_MEMORY, dir=str(work))  # noqa: SIM115 - who asks closes it
    if data := tar.extractfile(member):
        shutil.copyfileobj(data, file, 1 << 20)
    file.seek(0)
    return cast(BinaryIO, file)


def real(path: str, links: Mapping[str, str]) -> str:
    """A path with all its links followed inside the image; "" where they lead in a circle or above the root."""
    followed, done = 0, ""
    rest = [part for part in path.split("/") if part]
    while rest:
        part = rest.pop(0)
        if part == ".":
            continue
        if part == "..":
            done = done.rpartition("/")[0]
            continue
        here = f"{done}/{part}".lstrip("/")
        if (target := links.get(here)) is None:
            done = here
            continue
        followed += 1
        if followed > FOLLOWED or len(rest) > DEPTH:
            return ""
        rest = [piece for piece in target.split("/") if piece] + rest
        if target.startswith("/"):
            done = ""
    return done
