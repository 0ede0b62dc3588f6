"""Read a layer's headers while another process still writes its tar: when it ends, there is nothing left to parse."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, cast

from sparkpin.image.layer_tar import CanonicalLayer, read_layer

PAUSE = 0.02
"""Seconds between two looks at a file that has not grown far enough."""


class WriterFailed(Exception):
    """Who writes the file failed."""


class Followed(io.RawIOBase):
    """A file that another process writes from its beginning to its end. A read waits for all of its bytes.

    written: set when the file is whole; stopped: set when it will never be.
    """

    def __init__(self, path: Path, written: threading.Event, stopped: threading.Event) -> None:
        super().__init__()
        self.path, self.written, self.stopped = path, written, stopped
        self.file: BinaryIO | None = None

    def opened(self) -> BinaryIO:
        while self.file is None:
            whole = self.written.is_set()
            try:
                self.file = self.path.open("rb", buffering=0)
            except FileNotFoundError:
                if whole:
                    raise
                self.wait()
        return self.file

    def wait(self) -> None:
        if self.stopped.is_set():
            raise WriterFailed
        self.written.wait(PAUSE)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self.opened().seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        """So many bytes; fewer only where the whole file ends."""
        data, whole = b"", False
        while len(data) < size and not whole:
            whole = self.written.is_set()  # before the read: what came in between is not missed
            got = self.opened().read(size - len(data))
            data += got
            if not got and not whole:
                self.wait()
        return data


def read_layer_of(path: Path, write: Callable[[], object], *, folder: bytes = b"") -> CanonicalLayer:
    """Call `write`, which lets another process write a tar to `path`; the canonical form of the tar, or of a folder of
    it, its file open.

    Raises what `write` raises, and what `read_layer` does.
    """
    written, stopped = threading.Event(), threading.Event()
    followed = Followed(path, written, stopped)
    path.unlink(missing_ok=True)  # an older one would be read instead
    try:
        with ThreadPoolExecutor(1, "headers") as pool:
            reading = pool.submit(read_layer, cast(BinaryIO, followed), folder=folder)
            try:
                write()
                written.set()
            except BaseException:
                stopped.set()
                raise
            layer = reading.result()
    except BaseException:
        if followed.file:
            followed.file.close()
        raise
    return CanonicalLayer(followed.opened(), layer.members, layer.size)
