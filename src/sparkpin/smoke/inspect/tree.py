"""The files of an image as a container sees them: from an archive such as `docker export` gives, or from a folder."""

from __future__ import annotations

import functools
import io
import os
import posixpath
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

from sparkpin.core.errors import InspectionError
from sparkpin.image.archive import Joined

IN_MEMORY = 1 << 26  # bytes of a file from an archive; a larger one goes to the disk while it is read


@dataclass(frozen=True)
class FoundPath:
    """A file or link."""

    path: str  # without a slash in front
    size: int = 0
    mode: int = 0
    link: str = ""  # its target, as it stands
    open: Callable[[], BinaryIO] = io.BytesIO  # the content, until the next file is asked for


def in_folder(root: Path) -> Iterator[FoundPath]:
    """The regular files and links of a folder. Raises InspectionError for one that may not be read."""

    def refuse(error: OSError) -> None:
        raise InspectionError(f"{error.filename}: {error.strerror}", next_step="the same command as root")

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders.sort()
        for path in sorted(Path(folder, name) for name in (*folders, *files)):
            name, about = str(path.relative_to(root)), path.lstat()
            if stat.S_ISLNK(about.st_mode):
                yield FoundPath(name, link=os.readlink(path))
            elif stat.S_ISREG(about.st_mode):
                content = functools.partial(io.FileIO, path)
                yield FoundPath(name, about.st_size, stat.S_IMODE(about.st_mode), open=content)


def in_archive(chunks: Iterable[bytes], work: Path) -> Iterator[FoundPath]:
    """The same of an archive that comes in pieces. work: folder for large files."""
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
