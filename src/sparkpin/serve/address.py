"""Where and how clients reach a server: what `serve` is told once, and keeps from one server to the next."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from sparkpin.core.errors import InputError
from sparkpin.pins.vllm_flags import flag_value
from sparkpin.serve.rules import Limits

NONE = "none"  # instead of a value: no longer
GREATEST = {"body": 64 << 20, "connections": 65_536, "idle": 86_400, "hold": 86_400}  # the server's memory; HAProxy's
DEFAULT = Limits()


@dataclass(frozen=True)
class Address:
    """host, port: on this machine; cert, tls_key: absolute paths of PEM files, "" for plain HTTP; allow: paths of vLLM
    that are open besides `rules.PATHS`."""

    host: str = "127.0.0.1"
    port: int = 8000
    cert: str = ""
    tls_key: str = ""
    allow: tuple[str, ...] = ()
    limits: Limits = DEFAULT

    @classmethod
    def of_command(cls, argv: Sequence[str]) -> Address:
        """Where a server is at first: the port is the recipe's own. InputError for none."""
        port = flag_value(argv, "--port") or str(cls.port)
        if not port.isdecimal():
            raise InputError(f"--port: got {port!r}, expected 1 to 65535", next_step="correct port in the recipe")
        return cls(port=int(port))

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def read(cls, text: str) -> Address:
        """What `text` gave. InputError for what another version wrote, and for values that no option would take."""
        try:
            value = json.loads(text)
            found = cls(**value | {"allow": tuple(value["allow"]), "limits": Limits(**value["limits"])})
            if (type(found.host), type(found.port)) != (str, int):
                raise TypeError(f"host {found.host!r}, port {found.port!r}")
            return found.options.applied(found)
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"the address of a server, as another version wrote it: {text[:200]}: {error}",
                next_step="invoke stop, with the SPARKPIN_HOME of that server, then invoke serve",
            ) from None

    @property
    def options(self) -> AddressOptions:
        """That lead to it from any other address."""
        limits = [f"{name}={value}" for name, value in self.other_limits.items()]
        cert = self.cert or NONE
        allow, limit = ",".join(self.allow) or NONE, ",".join(limits) or NONE
        return AddressOptions(self.port, self.host, cert, self.tls_key or None, allow, limit)

    @property
    def words(self) -> str:
        """Its options for people: those that are not as they are by default."""
        words = self.options.words
        return " ".join(f"{name} {value}" for name, value in zip(words[::2], words[1::2], strict=True) if value != NONE)

    @property
    def other_limits(self) -> dict[str, int]:
        """Those that are not as they come."""
        return {name: value for name, value in asdict(self.limits).items() if value != getattr(DEFAULT, name)}


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
        found = known
        if self.port is not None:
            found = replace(found, port=self.port)
        if self.host is not None:
            found = replace(found, host=self.host)
        if self.tls_cert == NONE and self.tls_key is None:
            found = replace(found, cert="", tls_key="")
        elif self.tls_cert and self.tls_key and NONE not in (self.tls_cert, self.tls_key):
            found = replace(found, cert=absolute(self.tls_cert), tls_key=absolute(self.tls_key))
        elif self.tls_cert is not None or self.tls_key is not None:
            raise InputError(
                "--tls-cert and --tls-key go together",
                next_step=f"give both files; --tls-cert {NONE} goes back to plain HTTP",
            )
        if self.allow is not None:
            found = replace(found, allow=paths_of(self.allow))
        if self.limit is not None:
            found = replace(found, limits=limits_of(self.limit))
        return found

    @property
    def words(self) -> tuple[str, ...]:
        """As on the command line, from any folder."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        said |= {name: absolute(said[name]) for name in ("tls_cert", "tls_key") if said[name] not in (None, NONE)}
        return tuple(word for n, v in said.items() if v is not None for word in (f"--{n.replace('_', '-')}", str(v)))


UNCHANGED = AddressOptions()


def absolute(path: str) -> str:
    return str(Path(path).absolute())


def paths_of(text: str) -> tuple[str, ...]:
    paths = () if text == NONE else tuple(text.split(","))
    for path in paths:
        if not re.fullmatch(r"(/[A-Za-z0-9_.-]+)+", path) or {".", ".."} & {*path.split("/")}:
            raise InputError(
                f"--allow: got {path!r}, expected a path of vLLM, or several with commas between",
                next_step=f"for example --allow /v1/embeddings,/detokenize; --allow {NONE} closes them again",
            )
    return paths


def limits_of(text: str) -> Limits:
    known = {field.name: field.default for field in fields(Limits)}
    given = {} if text == NONE else dict(item.partition("=")[::2] for item in text.split(","))
    for name, value in given.items():
        if name not in known or not re.fullmatch(r"[1-9][0-9]{0,9}", value):
            now = ", ".join(f"{name}={value}" for name, value in known.items())
            raise InputError(
                f"--limit: got {name}={value}, expected a name and a whole number above 0",
                next_step=f"--limit {NONE} sets them as they are by default: {now}",
            )
    limits = Limits(**{name: int(value) for name, value in given.items()})
    for name, most in GREATEST.items():
        if (value := getattr(limits, name)) > most:
            raise InputError(
                f"--limit: got {name}={value}, expected at most {most}", next_step=f"--limit {name}={most}"
            )
    return limits


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
