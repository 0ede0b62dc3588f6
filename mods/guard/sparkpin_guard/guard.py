"""An ASGI class before vLLM's app: what it may see of a request, and what a client may see of its failures.

For vLLM 0.32 and 0.33, whose `--middleware` takes a class's import path, and whose app has the engine's configuration
in its state once it starts. May go when vLLM bounds what `rows` names, and ends a broken stream as one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sparkpin_modkit import enabled, report, reporting_failure

from sparkpin_guard.rows import fault, rows

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

MOD = "guard"
VERSION = "0.1.0"
BODY = 64 << 20  # bytes of a request's body, also of one that comes in chunks and says no length
HELD = 4 * BODY  # bytes of all bodies that vLLM is at work on
LARGE = 1 << 16  # bytes; a larger body is read beside the event loop
RETRY_SECONDS = b"5"
FORMS = re.compile(r"/v1/audio/(transcriptions|translations)")  # a recording: no JSON
FAILED = "the server failed at this request, and its log has the cause; ask again"
INTERNAL = re.compile(rb"EngineCore|EngineDead|stack ?trace|Traceback|\.py\b|validation errors? for ")
MESSAGE = re.compile(rb'("message": ?)"(?:[^"\\]|\\.)*"')
ERRORS = (b'data: {"error"', b"event: error")  # how vLLM begins the last event of a stream that broke


class Refused(Exception):
    """A request that vLLM does not see."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Guard:
    """As ``app.add_middleware(Guard)`` makes it. body, held: see BODY and HELD."""

    def __init__(self, app: App, body: int = BODY, held: int = HELD) -> None:
        self.app, self.on, self.body, self.most = app, enabled(MOD), body, held
        self.held = 0
        # One thread: json.loads keeps Python's lock, so more of them would only keep the loop waiting for longer.
        self.reader = ThreadPoolExecutor(1, "sparkpin-guard")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if not self.on:
            return await self.app(scope, receive, send)
        if scope["type"] == "lifespan":
            self.begin(scope)
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body, answer = b"", Answer(send)
        try:
            if scope["method"] == "POST":
                body = await self.read(scope, receive)
                receive = replay(body, receive)
            self.held += len(body)
            await self.app(scope, receive, answer)
        except Refused as refused:
            await respond(send, refused.status, str(refused))
        except Exception:
            if not answer.is_begun:
                await respond(send, 500, FAILED)
            raise  # for the server's log
        finally:
            self.held -= len(body)

    def begin(self, scope: Message) -> None:
        """The server starts. Where this fails no request is answered, since there is no table."""
        with reporting_failure(MOD, version=VERSION):
            sequences = scope["app"].state.vllm_config.scheduler_config.max_num_seqs
            self.rows = rows(sequences)
        report(MOD, "active", version=VERSION, max_num_seqs=sequences)

    async def read(self, scope: Message, receive: Receive) -> bytes:
        """The body, which vLLM may see. Raises Refused."""
        headers = dict(scope["headers"])
        if int(headers.get(b"content-length", 0)) > self.body:
            raise Refused(413, f"expected a body of at most {self.body} bytes")
        body, more = bytearray(), True
        try:
            while more:  # a client that has gone leaves a part of one, and hears no answer
                message = await receive()
                part, more = message.get("body", b""), message.get("more_body", False)
                body += part
                self.held += len(part)
                if len(body) > self.body:
                    raise Refused(413, f"expected a body of at most {self.body} bytes")
                if self.held > self.most:
                    raise Refused(503, "too many large requests at a time")
            data, path = bytes(body), scope["path"].removeprefix(scope.get("root_path", ""))
            if data and not FORMS.fullmatch(path) and (why := await self.fault_of(path, data)):
                raise Refused(400, why)
            return data
        finally:
            self.held -= len(body)

    async def fault_of(self, path: str, data: bytes) -> str | None:
        if len(data) <= LARGE:
            return fault(self.rows, path, data)
        return await asyncio.get_running_loop().run_in_executor(self.reader, fault, self.rows, path, data)


class Answer:
    """Where vLLM sends its answer to: what is inside it stays there, and what broke does not look complete."""

    def __init__(self, send: Send) -> None:
        self.send, self.is_begun, self.is_stream, self.is_broken = send, False, False, False
        self.failure: Message | None = None  # a start that waits for its text
        self.text = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_begun = True
            self.is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
            if message["status"] == 500:
                self.failure = message
                return
        elif self.failure:
            self.text += message.get("body", b"")
            if not message.get("more_body"):
                await self.fail(self.failure, bytes(self.text))
            return
        elif self.is_stream:
            message = {**message, "body": self.event(message.get("body", b""))}
        await self.send(message)

    def event(self, body: bytes) -> bytes:
        """vLLM ends a stream that broke with an error and [DONE], by which clients know a complete one."""
        if body.startswith(ERRORS):
            self.is_broken = True
            return plain(body)
        return b"" if self.is_broken and body.strip() == b"data: [DONE]" else body

    async def fail(self, start: Message, text: bytes) -> None:
        text = plain(text)
        kept = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        headers = [*kept, (b"content-length", b"%d" % len(text)), (b"retry-after", RETRY_SECONDS)]
        await self.send({**start, "headers": headers})
        await self.send({"type": "http.response.body", "body": text})


def plain(text: bytes) -> bytes:
    """An error without what only the log is for."""
    return MESSAGE.sub(rb'\1"' + FAILED.encode() + b'"', text) if INTERNAL.search(text) else text


def replay(body: bytes, receive: Receive) -> Receive:
    """`receive`, with the body that was taken from it before what comes then: that the client has gone."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again


async def respond(send: Send, status: int, why: str) -> None:
    """As OpenAI's API writes an error."""
    text = json.dumps({"error": {"message": why, "type": MOD, "param": None, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(text))]
    headers += [(b"retry-after", RETRY_SECONDS)] if status >= 500 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
