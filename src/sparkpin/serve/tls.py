"""A certificate and its key, looked at before a server is to use them."""

from __future__ import annotations

import contextlib
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
    """InputError unless both can be read, belong together, and would be taken by a client now."""
    asked = f"--tls-cert {cert} --tls-key {key}"
    try:
        pair = Tls(Path(cert).read_bytes(), Path(key).read_bytes())
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(cert, key, password=lambda: b"")  # else it would ask the terminal
        client = ssl.create_default_context(cadata=pair.cert.decode("ascii"))
        client.check_hostname = False  # which names it is for is the clients' matter
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        shake_hands(server, client)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = getattr(error, "verify_message", "") or getattr(error, "strerror", "") or str(error)
        raise InputError(
            f"{asked}: {why}",
            next_step="a certificate and its own key as PEM files, valid today, without a pass phrase",
        ) from None
    return pair


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """In memory. ssl.SSLError where they do not agree."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
    for _ in range(4):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
