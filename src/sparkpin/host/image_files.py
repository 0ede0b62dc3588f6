"""Files of an image, read through a container that is made and never started."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import docker.errors

from sparkpin.core.files import CHUNK
from sparkpin.host.engine import Engine, engine_errors


@contextlib.contextmanager
def unstarted(engine: Engine, ref: str) -> Iterator[Any]:
    with engine_errors():
        container = engine.client.containers.create(ref, ["-"], network_mode="none")
        try:
            yield container
        finally:
            container.remove(force=True)


def read_files(engine: Engine, ref: str, paths: Iterable[str], *, limit: int) -> dict[str, bytes]:
    """Path (without a slash in front) -> content, of regular files of at most `limit` bytes; others are left out.

    So are names that are not UTF-8: the engine's API cannot ask for them.
    """
    found: dict[str, bytes] = {}
    with unstarted(engine, ref) as container:
        for path in (path for path in paths if path.isprintable()):
            with contextlib.suppress(docker.errors.NotFound):
                chunks, status = container.get_archive(f"/{path}")
                if status and status["size"] <= limit:
                    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
                        member = tar.next()
                        if member and member.isreg() and (file := tar.extractfile(member)):
                            found[path] = file.read()
    return found


@contextlib.contextmanager
def exported(engine: Engine, ref: str, came: Callable[[int], object] = lambda count: None) -> Iterator[Iterator[bytes]]:
    """All files of an image as one archive, in pieces, as a container would see them. came: gets the bytes of each."""

    def pieces(container: Any) -> Iterator[bytes]:
        for piece in container.export(chunk_size=CHUNK):
            came(len(piece))
            yield piece

    with unstarted(engine, ref) as container:
        yield pieces(container)
