"""A port on 127.0.0.1 for a server that this machine reaches otherwise: its container has no network, and some clients
ask by URL.

No front stands before it (`serve/front`): as long as it is open, every user of this machine may ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

CHUNK = 1 << 16
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dial = Callable[[], Awaitable[Ends]]
"""Opens a connection to the server."""


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()


class Bridge:
    """Its connections, each a task. An HTTP client closes a connection as a whole: the end of one way ends both."""

    def __init__(self, dial: Dial) -> None:
        self.dial, self.running = dial, set[asyncio.Task[None]]()  # the loop itself keeps no task alive

    async def listen(self) -> asyncio.Server:
        return await asyncio.start_server(self.accept, "127.0.0.1", 0)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self.connect(reader, writer))
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            there = await self.dial()
            ways = [asyncio.create_task(carry(reader, there[1])), asyncio.create_task(carry(there[0], writer))]
            with contextlib.closing(there[1]):
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await cancelled(ways)

    async def end(self, server: asyncio.Server) -> None:
        server.close()
        await cancelled(self.running)
        await asyncio.sleep(0)  # the transports close in the loop's next turn


async def cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    given = tuple(tasks)
    for task in given:
        task.cancel()
    await asyncio.gather(*given, return_exceptions=True)


@contextlib.contextmanager
def listening(socket: Path) -> Iterator[int]:
    """The port. The folder is opened first: a socket's own path may have 107 bytes at most."""
    folder = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        with carrying(lambda: asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{socket.name}")) as port:
            yield port
    finally:
        os.close(folder)


@contextlib.contextmanager
def carrying(dial: Dial) -> Iterator[int]:
    """The port, as long as it is open."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    bridge = Bridge(dial)
    try:
        server = asyncio.run_coroutine_threadsafe(bridge.listen(), loop).result()
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            asyncio.run_coroutine_threadsafe(bridge.end(server), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
