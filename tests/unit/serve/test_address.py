"""What clients reach a server by: options, certificates, what a front may not do any more."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import platform
import socket
import subprocess
from pathlib import Path

import pytest

from sparkpin.core.errors import InputError
from sparkpin.serve import closed_in, tls
from sparkpin.serve.address import Address, AddressOptions
from sparkpin.serve.rules import Limits


def test_what_is_not_said_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = AddressOptions(8001, "0.0.0.0", "c.pem", "k.pem", "/score,/v2/embed", "requests=7,restarts=1")
    first = said.applied(Address())
    assert first == Address(
        "0.0.0.0", 8001, f"{tmp_path}/c.pem", f"{tmp_path}/k.pem", ("/score", "/v2/embed"), Limits(requests=7, restarts=1)
    )
    assert AddressOptions().applied(first) == first == Address.read(first.text)
    back = AddressOptions(tls_cert="none", allow="none", limit="none").applied(first)
    assert back == Address("0.0.0.0", 8001)
    assert AddressOptions(port=1, tls_cert="c", tls_key="k").words == ("--port", "1", "--tls-cert", "c", "--tls-key", "k")


WRONG = (
    {"tls_cert": "c.pem"},
    {"tls_key": "k.pem"},
    *({"allow": text} for text in ("", "score", "/", "/a b", "/../x", "/a/./b", "/a?b", "/a,", "//a", "/a\n")),
    *({"limit": text} for text in ("", "x=1", "requests", "requests=0", "requests=-1", "requests=1.5", "requests=x")),
)


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_a_value_that_is_none(options: dict[str, str]) -> None:
    with pytest.raises(InputError, match="--"):
        AddressOptions(**options).applied(Address())  # type: ignore[arg-type]


def certificate(folder: Path, name: str, days: int = 2) -> tuple[str, str]:
    """A certificate that signs itself, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    dates = () if days > 0 else ("-not_before", "20200101000000Z", "-not_after", "20200102000000Z")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=x"]
        + ["-out", str(cert), "-keyout", str(key), *(dates or ("-days", str(days)))],
        check=True,
        capture_output=True,
    )
    return str(cert), str(key)
