"""What came over the wire, or why nothing whole did. Pure: `client` makes it."""

from __future__ import annotations

import base64
from dataclasses import dataclass
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

    def as_dict(self) -> dict[str, Any]:
        """The body as text, or as Base64 where it is not UTF-8."""
        try:
            body = {"response": self.body.decode("utf-8")}
        except UnicodeDecodeError:
            body = {"response_base64": base64.b64encode(self.body).decode()}
        return {
            "method": self.method,
            "path": self.path,
            "request": self.request,
            "status": self.status,
            "content_type": self.content_type,
            **body,
            "seconds": round(self.seconds, 3),
            **({"first_seconds": round(self.first, 4)} if self.first is not None else {}),
            **({"fault": self.fault} if self.fault else {}),
        }
