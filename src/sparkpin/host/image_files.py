"""Files of an image, read through a container that is made and never started."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import docker.errors

from sparkpin.core.files import CHUNK
from sparkpin.host.engine import Engine, engine_errors


def read_files(engine: Engine, ref: str, paths: Iterable[str], *, limit: int) -> dict[str, bytes]:
    """Path (without a slash in front) -> content, of regular files of at most `limit` bytes; others are left out.

    So are names that are not UTF-8: the engine's API cannot ask for them.
    """
    found: dict[str, bytes] = {}
    with engine_errors():
        container = engine.client.containers.create(ref, ["-"], network_mode="none")
        try:
            for path in (path for path in paths if path.isprintable()):
                with contextlib.suppress(docker.errors.NotFound):
                    chunks, status = container.get_archive(f"/{path}")
                    if not status or status["size"] > limit:
                        continue
                    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
                        member = tar.next()
                        if member and member.isreg() and (file := tar.extractfile(member)):
                            found[path] = file.read()
        finally:
            container.remove(force=True)
    return found


@contextlib.contextmanager
def exported(engine: Engine, ref: str, came: Callable[[int], object] = lambda count: None) -> Iterator[Iterator[bytes]]:
    """All files of an image as one archive, in pieces, as a container would see them. came: gets the bytes of each."""
    with engine_errors():
        container = engine.client.containers.create(ref, ["-"], network_mode="none")

        def pieces() -> Iterator[bytes]:
            for piece in cast(Iterator[bytes], container.export(chunk_size=CHUNK)):  # the stubs say str
                came(len(piece))
                yield piece

        try:
            yield pieces()
        finally:
            container.remove(force=True)
