"""A certificate and its key, looked at before a server is to use them."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.errors import InputError


@dataclass(frozen=True)
class Tls:
    """Both as PEM; the certificate with those between it and its authority."""

    cert: bytes
    key: bytes


def read(cert: str, key: str) -> Tls:
    """InputError unless both can be read and belong together."""
    pair = Tls(pem("--tls-cert", cert, "CERTIFICATE"), pem("--tls-key", key, "PRIVATE KEY"))
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(cert, key, password=lambda: b"")  # else it would ask the terminal
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        said = getattr(error, "reason", "") or str(error)
        mixed = "the key is of another certificate" if said == "KEY_VALUES_MISMATCH" else ""
        raise wrong("--tls-cert", cert, f"got what TLS does not take with --tls-key {key}: {mixed or said}") from None
    return pair


def pem(option: str, file: str, kind: str) -> bytes:
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise wrong(option, file, str(error.strerror)) from None
    if not re.search(rb"-----BEGIN [A-Z ]*%b-----" % kind.encode(), data):
        raise wrong(option, file, f"got no -----BEGIN {kind}----- in it")
    if b"ENCRYPTED" in data:
        raise wrong(option, file, "got a key with a pass phrase")
    return data


def wrong(option: str, file: str, why: str) -> InputError:
    return InputError(
        f"{option} {file}: {why}; expected a certificate and its own key as PEM files, no pass phrase",
        next_step="openssl x509 -noout -subject -dates -in CERT; openssl pkey -noout -check -in KEY; "
        "docs/serving.md has the line that makes both",
    )
