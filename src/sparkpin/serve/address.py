"""Where and how clients reach a server: what `serve` is given once, and keeps from one server to the next; the API key
of one that other machines reach; and who has a port of this machine.

The key is a file of the data directory that only its owner may read. It is not in a command line, a label or a
container's settings, where `ps` and `docker inspect` would show it, nor in any file of a container: the proxy gets its
SHA-256.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import socket
import ssl
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from sparkpin.core.errors import BusyError, InputError
from sparkpin.core.files import atomic_file
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.host.machine import output
from sparkpin.pins.vllm_flags import flag_value
from sparkpin.releases.container import HOME_LABEL

NONE = "none"  # instead of a value: no longer
Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[int, Field(gt=0, le=86_400)]


class Limits(BaseModel):
    """What one client, and all of them together, may take of a server.

    body: bytes of a request; what may be in it mods/guard knows, within vLLM. requests, per_client: under way at a
    time, in all and of one address; per_second: begun in a second by one address. connections, client_connections: open
    at a time. idle: seconds without a request, for its body, or of an answer that nobody takes. hold: seconds that a
    request waits for a server that starts; None: by the release (`proxy.hold_for`).

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
    hold: Seconds | None = None
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

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return ip_address(self.host).is_loopback

    @property
    def reachable(self) -> Address:
        """What to ask on this machine."""
        return self.model_copy(update={"host": {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)})

    @property
    def url(self) -> str:
        """Base of the OpenAI endpoint."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.cert else ''}://{host}:{self.port}/v1"

    @classmethod
    def of_command(cls, argv: Sequence[str]) -> Address:
        """Where a server is at first: the port is the recipe's own. InputError for none."""
        port = flag_value(argv, "--port")
        with input_errors("the recipe: --", "correct port in the recipe"):
            return cls.model_validate({"port": port} if port else {})


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
        if self.tls_cert == NONE and self.tls_key is None:
            return {"cert": "", "tls_key": ""}
        given = {"cert": self.tls_cert, "tls_key": self.tls_key}
        files = {name: str(Path(file).absolute()) for name, file in given.items() if file and file != NONE}
        if len(files) != 2 and any(file is not None for file in given.values()):
            step = f"give both files; --tls-cert {NONE} goes back to plain HTTP"
            raise InputError("--tls-cert and --tls-key go together", next_step=step)
        return files


UNCHANGED = AddressOptions()


def limits_of(text: str) -> dict[str, str]:
    """As they are typed, by name."""
    given = dict(item.partition("=")[::2] for item in text.split(","))
    if unknown := sorted(given.keys() - Limits.model_fields.keys()):
        known = ",".join(f"{name}={value}" for name, value in Limits() if value)
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
            "docs/lan.md has the line that makes both",
        ) from None


def signs_itself(cert: str) -> bool:
    """Whether clients have to be told to trust it, for a hint: False where openssl, which knows it, is not installed.
    cert: "" for none."""
    return bool(cert) and output(["openssl", "verify", "-CAfile", cert, cert]) is not None


def key_path(paths: Paths, recipe: str) -> Path:
    return paths.home / "keys" / recipe


def key_of(paths: Paths, recipe: str, address: Address) -> str | None:
    """That of the data directory, made where there is none yet; None for a server that only this machine reaches."""
    if address.is_local:
        return None
    path = key_path(paths, recipe)
    if not path.exists():
        path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        with atomic_file(path, mode=0o600) as file:
            file.write(f"{secrets.token_urlsafe()}\n".encode())
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise InputError(
            f"{path}: mode {mode:o} lets others read the API key, expected 600", next_step=f"chmod 600 {path}"
        )
    key = path.read_text(encoding="utf-8").strip()
    if len(key) < 16 or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(
            f"{path}: expected a key of at least 16 letters and digits", next_step=f"rm {path}; `serve` makes one"
        )
    return key


def require_free(engine: Engine, host: str, port: int) -> None:
    """Raise BusyError when something listens at the address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise InputError(
                    f"cannot listen on {host}:{port}: {error.strerror}",
                    next_step="an address of this machine, --host 127.0.0.1 or 0.0.0.0, or another port",
                ) from None
            holder, home = port_holder(engine, port)
            whose = f", a server of the home {home}" if home else ""
            raise BusyError(
                f"port {port} on {host} is taken{f' by {holder}{whose}' if holder else ''}",
                next_step=f"stop that{f' (SPARKPIN_HOME={home} invoke stop)' if home else ''}, or choose another port: "
                f"the same command with --port {port + 1 if port < 65535 else port - 1}",
            ) from None


def port_holder(engine: Engine, port: int) -> tuple[str, str]:
    """The container or process that listens on a port of this machine, "" where neither can be seen; and SPARKPIN_HOME
    of the release that it serves, "" for what is no server of ours."""
    with engine_errors():
        for container in engine.client.containers.list(filters={"publish": str(port)}, ignore_removed=True):
            return f"the container {container.name}", container.labels.get(HOME_LABEL, "")
    found = re.search(r'users:\(\("(.*?)",pid=(\d+)', listeners(port))  # other people's are shown to root alone
    return (f"{found[1]} (process {found[2]})" if found else ""), ""


def listeners(port: int) -> str:
    """A line of ss(8) for each TCP socket that listens on a port, with its process; "" where none does."""
    return output(["ss", "-Hltnp", f"sport = :{port}"]) or ""
