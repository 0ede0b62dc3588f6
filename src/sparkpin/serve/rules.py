"""What the containers of a service share, and the limits of the proxy. What it lets through is in rules.yaml."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

FOLDER = "/run/sparkpin"  # in the containers of both: what the host has put there
SOCKETS = "/run/v"  # in the containers of both: a volume
SERVER, SOCKET = f"{SOCKETS}/server", "s"  # the folder there that is the server's, and its socket in that
Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[int, Field(gt=0, le=86_400)]


class Limits(BaseModel):
    """What one client, and all of them together, may take of a server.

    body: bytes of a request; what may be in it mods/guard knows, within vLLM. requests, per_client: under way at a
    time, in all and of one address; per_second: begun in a second by one address. connections, client_connections: open
    at a time. idle: seconds without a request, for its body, or of an answer that nobody takes. hold: seconds that a
    request waits for a server that starts.

    restarts: how often a server that failed is started again; all of them are there again once it has run for an hour.

    Clients of this machine have one address together: Docker's port is a proxy to them.
    """

    model_config = ConfigDict(frozen=True)

    body: Annotated[Count, Field(le=64 << 20)] = 32 << 20  # the server's memory
    requests: Count = 256
    per_client: Count = 128
    per_second: Count = 100
    connections: Annotated[Count, Field(le=65_536)] = 1024
    client_connections: Count = 512
    idle: Seconds = 60
    hold: Seconds = 600
    restarts: Count = 5
