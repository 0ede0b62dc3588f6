"""How the containers of a release for several machines meet before a server starts, and end together.

It runs in them beside process 1 (`inside`), with the image's Python and the standard library alone. Rank 0 listens on
its own address, the others call. Each line is of words:

    rank 0:  NONCE
    rank N:  N NONCE PROOF
    rank 0:  PROOF RELEASE
    rank N:  PROOF RELEASE
    rank 0:  go                once all of them are there

A proof is an HMAC-SHA256, by the key of these nodes, over who says it, both nonces, the rank and the release. Who has
not the key sees a nonce and nothing else, and keeps nobody out: when too many connections have proved nothing, the
oldest goes of the address that has most. From its proof on each sends an empty line a second, the beat, and does so
while it serves. Nothing listens any more then.

What is said afterwards is neither secret nor proved, as is all that vLLM's own nodes say to each other: the link has to
be a network of its own (docs/nodes.md).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SILENT = 10  # beats of a node's own without one of a peer: then that is gone. A node that was frozen does not count on
BEAT_SECONDS = 1.0
HANDSHAKE_SECONDS = 5.0
LINE = 4096  # bytes of the longest
STRANGERS = 128  # connections that have proved nothing
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 5.0  # between two calls
TELL_SECONDS = 30.0  # between two lines of the log that say the same
RECORD = Path("/model/sparkpin.json")  # of the checkpoint, with the SHA-256 of each of its files; written last
CALLER, LISTENER, GO = "caller", "listener", b"go\n"


class Stranger(Exception):
    """Somebody who has not the key."""


class Refused(Exception):
    """A peer, with the key, that serves something else; the text names both sides."""


FAULTS = (OSError, EOFError, ValueError, Stranger)  # of a connection; TimeoutError is an OSError


def release_here(section: dict[str, Any], record: Path = RECORD) -> str:
    """What has to be the same on all nodes, as a word."""
    try:
        digest = hashlib.sha256(record.read_bytes()).hexdigest()
    except OSError as error:
        raise Refused(f"the checkpoint has no record, so it is not complete: {error}") from None
    same = {"release": section["release"], "checkpoint": digest, "nodes": section["nodes"]}
    return json.dumps(same, separators=(",", ":"))


@dataclass
class Peer:
    """One that has proved its key. heard: since the last look; go: whether it said that all are there."""

    name: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    silent: int

    def __post_init__(self) -> None:
        self.heard, self.go = True, asyncio.Event()
        self.gone = asyncio.create_task(self.beating())

    async def beating(self) -> str:
        """Until it is gone; how."""
        listening, quiet = asyncio.create_task(self.listening()), 0
        while quiet < self.silent:
            self.writer.write(b"\n")
            await asyncio.wait({listening}, timeout=BEAT_SECONDS)
            if listening.done():
                return f"{self.name} closed the connection"
            quiet = 0 if self.heard else quiet + 1
            self.heard = False
        listening.cancel()
        return f"{self.name} was silent for {self.silent} s"

    async def listening(self) -> None:
        try:
            while line := await self.reader.readline():
                self.heard = True
                if line == GO:
                    self.go.set()
        except FAULTS:
            pass

    def close(self) -> None:
        self.gone.cancel()
        self.writer.transport.abort()


class Peers(threading.Thread):
    """The other nodes of this one.

    met: set once all are there, or with Refused. After that each second `beat` is called, and `lost` with the reason as
    soon as one is gone; this node's server has to end then, and this process.
    """

    def __init__(
        self,
        section: dict[str, Any],
        key: bytes,
        release: str,
        *,
        say: Callable[[str], None],
        beat: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        super().__init__(name="peers", daemon=True)
        self.rank, self.nodes, self.port = int(section["rank"]), int(section["nodes"]), int(section["port"])
        self.own, self.head, self.silent = str(section["own"]), str(section["head"]), int(section["silent"])
        if not key:
            raise Refused("the key of these nodes is empty, so anybody would have it; next: invoke serve")
        self.key, self.release = key, release
        self.say, self.beat, self.lost = say, beat, lost
        self.met: Future[None] = Future()
        self.told: dict[str, float] = {}
        self.strangers = 0  # dropped since the log said so

    def run(self) -> None:
        try:
            why = asyncio.run(self.together())
        except Exception as error:
            if not self.met.done():
                self.met.set_exception(error)
                return
            why = f"{type(error).__name__}: {error}"
        self.lost(why)

    async def together(self) -> str:
        peers = [await self.called()] if self.rank else await self.gathered()
        self.met.set_result(None)
        try:
            while True:
                gone, _ = await asyncio.wait(
                    {peer.gone for peer in peers}, timeout=BEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if gone:
                    return gone.pop().result()
                self.beat()
        finally:
            for peer in peers:
                peer.close()

    async def gathered(self) -> list[Peer]:
        """All others, as rank 0. One that goes before all are there is waited for again."""
        peers: dict[int, Peer] = {}
        strangers: dict[asyncio.StreamWriter, str] = {}
        complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(strangers) >= STRANGERS:
                most = Counter(strangers.values()).most_common(1)[0][0]
                oldest = next(one for one, address in strangers.items() if address == most)
                del strangers[oldest]
                oldest.transport.abort()
            strangers[writer] = address_of(writer)
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    rank = await self.greeted(reader, writer)
            except Refused as why:
                if not complete.done():
                    complete.set_exception(why)
                writer.close()  # after what is under way: both sides are to know why
                return
            except FAULTS as error:
                writer.transport.abort()
                self.tell_stranger(writer, error)
                return
            finally:
                strangers.pop(writer, None)
            if complete.done():
                writer.transport.abort()
                return
            if rank in peers:
                peers.pop(rank).close()  # it was started again
            peers[rank] = peer = Peer(f"rank {rank}", reader, writer, self.silent)
            peer.gone.add_done_callback(lambda _: leave(rank, peer))
            self.say(f"rank {rank} is here, {len(peers)} of {self.nodes - 1}")
            if len(peers) == self.nodes - 1:
                complete.set_result(None)

        def leave(rank: int, peer: Peer) -> None:
            if not complete.done() and peers.get(rank) is peer:
                del peers[rank]
                peer.writer.transport.abort()
                self.say(f"{peer.gone.result()}; waiting for it")

        server = await self.listening(welcome)
        self.say(f"waiting for {self.nodes - 1} other node(s) at {self.own}, port {self.port}")
        try:
            await complete
        finally:
            server.close()
            for writer in list(strangers):
                writer.transport.abort()
        for peer in peers.values():
            peer.writer.write(GO)
        return list(peers.values())

    async def listening(self, welcome: Callable[..., Any]) -> asyncio.Server:
        """The address may come later than this container, as after a boot."""
        pause = PAUSE_SECONDS
        while True:
            try:
                return await asyncio.start_server(welcome, self.own, self.port, limit=LINE, backlog=STRANGERS)
            except OSError as error:
                self.tell(f"cannot listen at {self.own}, port {self.port}: {error}")
                await asyncio.sleep(pause)
                pause = min(1.5 * pause, LONGEST_PAUSE_SECONDS)

    async def greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        """The rank of who called."""
        nonce = secrets.token_hex(32)
        writer.write(f"{nonce}\n".encode())
        rank, theirs, proof = await words(reader, 3)
        self.require(proof, CALLER, nonce, theirs, rank)
        mine = self.proof(LISTENER, nonce, theirs, rank, self.release)
        writer.write(f"{mine} {self.release}\n".encode())
        proof, release = await words(reader, 2)
        self.require(proof, CALLER, nonce, theirs, rank, release)
        self.compare(release, f"rank {rank}")
        if rank not in map(str, range(1, self.nodes)):
            raise Refused(f"a node says that it is rank {rank} of {self.nodes}")
        return int(rank)

    async def called(self) -> Peer:
        """Rank 0, once it has said that all are there."""
        pause = PAUSE_SECONDS
        self.say(f"rank {self.rank} calls rank 0 at {self.head}, port {self.port}")
        while True:
            try:
                peer = await self.joined()
                self.say("rank 0 is here; waiting for the others")
                pause = PAUSE_SECONDS
                going = asyncio.create_task(peer.go.wait())
                await asyncio.wait({peer.gone, going}, return_when=asyncio.FIRST_COMPLETED)
                if peer.go.is_set():
                    return peer
                going.cancel()
                peer.close()
                why = peer.gone.result()
            except FAULTS as error:
                why = f"rank 0 at {self.head}, port {self.port}: {str(error) or type(error).__name__}"
            self.tell(f"{why}; calling again")
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_SECONDS)

    async def joined(self) -> Peer:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            reader, writer = await asyncio.open_connection(self.head, self.port, limit=LINE, local_addr=(self.own, 0))
            try:
                await self.introduced(reader, writer)
            except BaseException:
                writer.close()  # after what is under way: both sides are to know why
                raise
        return Peer("rank 0", reader, writer, self.silent)

    async def introduced(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (theirs,) = await words(reader, 1)
        nonce, rank = secrets.token_hex(32), str(self.rank)
        writer.write(f"{rank} {nonce} {self.proof(CALLER, theirs, nonce, rank)}\n".encode())
        try:
            proof, release = await words(reader, 2)
        except (OSError, EOFError):
            raise Stranger("it does not take the key of this node") from None
        self.require(proof, LISTENER, theirs, nonce, rank, release)
        mine = self.proof(CALLER, theirs, nonce, rank, self.release)
        writer.write(f"{mine} {self.release}\n".encode())
        await writer.drain()
        self.compare(release, "rank 0")

    def proof(self, *said: str) -> str:
        """No word has a line's end in it, so no two lists of words give the same text."""
        return hmac.new(self.key, "\n".join(said).encode(), hashlib.sha256).hexdigest()

    def require(self, proof: str, *said: str) -> None:
        if not hmac.compare_digest(proof, self.proof(*said)):
            raise Stranger("it has not the key of these nodes")

    def compare(self, release: str, who: str) -> None:
        if release != self.release:
            theirs, mine = json.loads(release), json.loads(self.release)
            other = [name for name in mine if theirs.get(name) != mine[name]]
            told = (f"{name} {str(theirs.get(name))[:12]}, here {str(mine[name])[:12]}" for name in other)
            raise Refused(f"{who} serves something else: {'; '.join(told)}")

    def tell(self, what: str) -> None:
        """In the log, unless it says so already."""
        now = time.monotonic()
        if now - self.told.get(what, -TELL_SECONDS) >= TELL_SECONDS:
            self.told = {what: now}
            self.say(what)

    def tell_stranger(self, writer: asyncio.StreamWriter, error: Exception) -> None:
        """However many there are, the log has a line in a while."""
        self.strangers += 1
        now = time.monotonic()
        if now - self.told.get("", -TELL_SECONDS) >= TELL_SECONDS:
            self.told[""] = now
            why = str(error) or type(error).__name__
            self.say(f"dropped {self.strangers} connection(s), the last from {address_of(writer)}: {why}")
            self.strangers = 0


def address_of(writer: asyncio.StreamWriter) -> str:
    return str((writer.get_extra_info("peername") or ("?",))[0])


async def words(reader: asyncio.StreamReader, count: int) -> list[str]:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError("it closed the connection")
    found = line[:-1].decode("ascii").split(" ", count - 1)
    if len(found) != count:
        raise ValueError("it does not speak as a node does")
    return found
