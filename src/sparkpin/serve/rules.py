"""What the proxy lets through, as data (see `proxy.cfg.j2`).

vLLM's own key guards /v1 alone, and of its other paths some end the engine (/generative_scoring) or change the server
(/scale_elastic_ep). So what is not in the table is not there, whoever asks.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

FOLDER = "/run/sparkpin"  # in the containers of both: what the host has put there
SOCKETS = "/run/v"  # in the containers of both: a volume
SERVER, SOCKET = f"{SOCKETS}/server", "s"  # the folder there that is the server's, and its socket in that
ANSWERS = {
    400: "no request that this server reads",
    401: "expected the API key, as Authorization: Bearer or x-api-key",
    403: "expected a Host that is this machine",
    404: "no such path here (`invoke serve --allow PATH` opens one)",
    405: "another method than this path has",
    408: "the request did not come in time",
    413: "a larger body than is allowed",
    429: "too many requests of this address",
    502: "the server broke off",
    503: "the server is down or starts, or has too many requests",
    504: "the server did not answer in time",
}
OPEN = "/health"  # the only one that no key guards
PATHS = {
    OPEN: "GET",
    "/metrics": "GET",
    "/version": "GET",
    "/v1/models": "GET",
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/messages": "POST",
    "/v1/messages/count_tokens": "POST",
    "/v1/responses": "POST",
    "/tokenize": "POST",
}
"""What agents and those who watch a server ask for; `serve --allow` opens more, for GET and POST."""

MANAGING = "it changes the server for all clients, and any client may ask for it"
RISKS = {
    "/generative_scoring": "requests to it end a server that drafts, and are refused all the same",
    "/invocations": "it takes the requests of any other path",
    "/v1/load_lora_adapter": "a client names files that the server reads",
    "/collective_rpc": "it runs any method of the workers",
    "/server_info": "it tells the environment of the server",
    "/start_profile": "it fills the disk",
    **dict.fromkeys(
        ("/scale_elastic_ep", "/fault_tolerance/apply", "/sleep", "/wake_up", "/pause", "/resume", "/abort_requests",
         "/release_kv_cache_memory", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine",
         "/start_weight_update", "/start_draft_weight_update", "/update_weights", "/finish_weight_update",
         "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/v1/unload_lora_adapter"), MANAGING),
}  # fmt: skip
"""Paths of vLLM 0.32 and 0.33 that `--allow` opens with a warning: why."""


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
