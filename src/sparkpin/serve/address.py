"""Where and how clients reach a server: what `serve` is told once, and keeps from one server to the next."""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from sparkpin.core.errors import InputError
from sparkpin.pins.vllm_flags import flag_value

NONE = "none"  # instead of a value: no longer
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


@contextlib.contextmanager
def input_errors(where: str, next_step: str) -> Iterator[None]:
    """InputError for what a model does not take. where: goes before the key. A whole object may hold secrets."""
    try:
        yield
    except ValidationError as error:
        fault = error.errors()[0]
        key = " ".join(str(part) for part in fault["loc"] if isinstance(part, str)).replace("limits ", "limit ")
        expected = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        expected = "a whole number" if fault["type"] == "int_parsing" else expected
        got = repr(value) if isinstance(value := fault["input"], str | int | float) else type(value).__name__
        raise InputError(f"{where}{key}: got {got}, expected {expected}", next_step=next_step) from None


def require_address(text: str) -> str:
    try:
        ip_address(text)
    except ValueError:
        raise ValueError("an address of this machine: 0.0.0.0 listens everywhere, 127.0.0.1 here only") from None
    return text


def require_path(text: str) -> str:
    if not re.fullmatch("(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)+", text):
        raise ValueError("a path of vLLM, such as /v1/embeddings")
    return text


class Address(BaseModel):
    """host, port: on this machine; cert, tls_key: absolute paths of PEM files, "" for plain HTTP; allow: paths of vLLM
    that are open besides those of rules.yaml."""

    model_config = ConfigDict(frozen=True)

    host: Annotated[str, AfterValidator(require_address)] = "127.0.0.1"
    port: Annotated[int, Field(gt=0, lt=65_536)] = 8000
    cert: str = ""
    tls_key: str = ""
    allow: tuple[Annotated[str, AfterValidator(require_path)], ...] = ()
    limits: Limits = Limits()

    @classmethod
    def of_command(cls, argv: Sequence[str]) -> Address:
        """Where a server is at first: the port is the recipe's own. InputError for none."""
        port = flag_value(argv, "--port")
        with input_errors("the recipe: --", "correct port in the recipe"):
            return cls.model_validate({"port": port} if port else {})


def endpoint(host: str, port: int, *, tls: bool) -> str:
    """The OpenAI endpoint's base."""
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}/v1"


def reachable(host: str) -> str:
    """The address to ask on this machine, for one to listen on."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


@dataclass(frozen=True)
class AddressOptions:
    """The options of `serve`; None: as it was."""

    port: int | None = None
    host: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    allow: str | None = None
    limit: str | None = None

    def applied(self, known: Address) -> Address:
        """InputError for a value that is none."""
        changes: dict[str, Any] = {"host": self.host, "port": self.port, **self.tls_files()}
        if self.allow is not None:
            changes["allow"] = () if self.allow == NONE else tuple(self.allow.split(","))
        if self.limit is not None:
            changes["limits"] = {} if self.limit == NONE else limits_of(self.limit)
        changes = {name: value for name, value in changes.items() if value is not None}
        with input_errors("--", "docs/serving.md, What is in front of it"):
            return Address.model_validate(known.model_dump() | changes)

    def tls_files(self) -> dict[str, str]:
        if self.tls_cert is None and self.tls_key is None:
            return {}
        if self.tls_cert == NONE and self.tls_key is None:
            return {"cert": "", "tls_key": ""}
        if not self.tls_cert or not self.tls_key or NONE in (self.tls_cert, self.tls_key):
            raise InputError(
                "--tls-cert and --tls-key go together",
                next_step=f"give both files; --tls-cert {NONE} goes back to plain HTTP",
            )
        return {"cert": absolute(self.tls_cert), "tls_key": absolute(self.tls_key)}


UNCHANGED = AddressOptions()


def absolute(path: str) -> str:
    return str(Path(path).absolute())


def limits_of(text: str) -> dict[str, str]:
    """As they are typed, by name."""
    given = dict(item.partition("=")[::2] for item in text.split(","))
    if unknown := sorted(given.keys() - Limits.model_fields.keys()):
        known = ",".join(f"{name}={value}" for name, value in Limits())
        cause = f"--limit: got {unknown[0]!r}, expected one of {', '.join(Limits.model_fields)}"
        raise InputError(cause, next_step=f"such as --limit {known.partition(',')[0]}; {NONE}: as by default, {known}")
    return given


def read_tls(cert: str, key: str) -> bytes:
    """Certificate and key as one PEM. InputError unless both can be read and belong together."""
    try:
        # Without a password it would ask the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: b"")
        return Path(cert).read_bytes() + b"\n" + Path(key).read_bytes()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise InputError(
            f"--tls-cert {cert} --tls-key {key}: {getattr(error, 'reason', None) or error}; "
            "expected a certificate and its own key as PEM files, no pass phrase",
            next_step="openssl x509 -noout -subject -dates -in CERT; openssl pkey -noout -check -in KEY; "
            "docs/serving.md has the line that makes both",
        ) from None
