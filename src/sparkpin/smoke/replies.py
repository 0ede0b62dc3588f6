"""What came over the wire, or why nothing whole did, and server-sent events in it (WHATWG HTML, 9.2.6). Pure: `client`
makes it, and no client library repairs it first."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass
from typing import Any


class Fault(Exception):
    """The server did not give a whole answer: refused, reset, too slow, too long."""


@dataclass(frozen=True)
class Reply:
    status: int
    content_type: str
    body: bytes

    @property
    def start(self) -> str:
        """The first characters, for a message."""
        return repr(self.body[:300].decode(errors="replace"))


@dataclass(frozen=True)
class Exchange:
    """One line of exchanges.jsonl. `status` is None and `fault` says why where no whole answer came."""

    method: str
    path: str
    request: dict[str, Any] | None
    status: int | None
    content_type: str
    body: bytes
    seconds: float
    fault: str = ""
    first: float | None = None  # seconds until the answer began
    first_bytes: int = 0  # that came then

    def as_dict(self) -> dict[str, Any]:
        """The body as text, or as Base64 where it is not UTF-8."""
        try:
            body = {"response": self.body.decode("utf-8")}
        except UnicodeDecodeError:
            body = {"response_base64": base64.b64encode(self.body).decode()}
        known = {name: value for name, value in asdict(self).items() if name not in ("body", "first", "fault")}
        first = {} if self.first is None else {"first_seconds": round(self.first, 4)}
        fault = {"fault": self.fault} if self.fault else {}
        return known | body | {"seconds": round(self.seconds, 3)} | first | fault


DONE = "[DONE]"


class BadStream(ValueError):
    """The bytes are not the stream of JSON objects that they should be."""


def parse_events(raw: bytes) -> list[str]:
    """The data of each event. A comment or another field is no event; an event that no blank line ends is an error."""
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise BadStream(f"not UTF-8 at byte {error.start}: {raw[error.start : error.start + 20]!r}") from None
    events: list[str] = []
    data: list[str] = []
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for line in lines[:-1]:
        field, _, value = line.partition(":")
        if line == "":
            if data:
                events.append("\n".join(data))
                data = []
        elif field == "data":
            data.append(value.removeprefix(" "))
    if data or lines[-1]:
        raise BadStream(f"the stream breaks off inside an event: ...{text[-80:]!r}")
    return events


def parse_chunks(raw: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a stream that ends with ``[DONE]``, and with nothing after it."""
    events = parse_events(raw)
    if not events:
        raise BadStream(f"no event in the answer: {raw[:200]!r}")
    if events[-1] != DONE or DONE in events[:-1]:
        raise BadStream(f"expected {DONE} once, at the end; the last event is {events[-1][:200]!r}")
    chunks = []
    for number, event in enumerate(events[:-1], start=1):
        try:
            chunk = json.loads(event)
        except ValueError as error:
            raise BadStream(f"event {number} is not JSON ({error}): {event[:200]!r}") from None
        if not isinstance(chunk, dict):
            raise BadStream(f"event {number} is no JSON object: {event[:200]!r}")
        if "error" in chunk:
            raise BadStream(f"event {number} is an error: {event[:300]}")
        chunks.append(chunk)
    return chunks
