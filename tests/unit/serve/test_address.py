"""What clients reach a server by: options, certificates."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from certificates import certificate
from made_releases import release

from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.serve import address, service
from sparkpin.serve.address import Address, AddressOptions, Limits, read_tls, signs_itself
from sparkpin.serve.served import Service


def test_at_first_a_server_has_its_recipe_s_port_on_this_machine_alone() -> None:
    argv = ["vllm", "serve", "/model", "--host", "0.0.0.0", "--port", "8100"]
    assert Address.of_command(argv) == Address(port=8100) and Address.of_command(argv[:3]) == Address()
    with pytest.raises(InputError, match="'many'"):
        Address.of_command([*argv[:-1], "many"])


def test_what_is_not_said_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = AddressOptions(8001, "0.0.0.0", "c.pem", "k.pem", "/score,/v2/embed", "requests=7,restarts=1")
    first = said.applied(Address())
    assert first == Address(
        host="0.0.0.0",
        port=8001,
        cert=f"{tmp_path}/c.pem",
        tls_key=f"{tmp_path}/k.pem",
        allow=("/score", "/v2/embed"),
        limits=Limits(requests=7, restarts=1),
    )
    assert AddressOptions().applied(first) == first == Address.model_validate_json(first.model_dump_json())
    back = AddressOptions(tls_cert="none", allow="none", limit="none").applied(first)
    assert back == Address(host="0.0.0.0", port=8001)


WRONG = (
    {"host": "spark"},
    {"port": 0},
    {"port": 65_536},
    {"tls_cert": "c.pem"},
    {"tls_key": "k.pem"},
    {"tls_cert": "none", "tls_key": "k.pem"},
    {"tls_cert": "", "tls_key": ""},
    *({"allow": text} for text in ("", "score", "/", "/a b", "/../x", "/a/./b", "/a?b", "/a,", "//a", "/a\n")),
    *({"limit": text} for text in ("", "x=1", "requests", "requests=0", "requests=-1", "requests=1.5", "requests=x")),
    *({"limit": text} for text in ("body=99999999", "idle=86401", "hold=86401", "connections=65537")),
)


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_a_value_that_is_none(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="--"):
        AddressOptions(**options).applied(Address())


def test_a_certificate_is_tried_before_it_is_used(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path / "one")
    other = certificate(tmp_path / "other")
    locked = tmp_path / "locked.key"
    subprocess.run(["openssl", "rsa", "-in", key, "-aes128", "-passout", "pass:x", "-out", locked], check=True)
    text = tmp_path / "text.pem"
    text.write_text("none\n")
    assert read_tls(cert, key) == Path(cert).read_bytes() + b"\n" + Path(key).read_bytes()
    absent = str(tmp_path / "absent")
    wrong = [(cert, file) for file in (other[1], str(locked), absent, str(text))]
    for pair in (*wrong, (str(text), key), (key, cert)):
        with pytest.raises(InputError) as caught:
            read_tls(*pair)
        assert all(file in caught.value.message for file in pair) and "openssl" in caught.value.next_step


def test_a_server_starts_where_nothing_can_examine_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it signs itself is for a hint alone."""
    cert, key = certificate(tmp_path / "one")
    assert signs_itself(cert) and not signs_itself("")
    paths, engine, made = Paths(tmp_path, tmp_path, tmp_path), Mock(), release(1)
    monkeypatch.setattr(service, "find", lambda *_: None)
    monkeypatch.setattr(service, "require_free", lambda *_: None)
    monkeypatch.setattr(address, "output", lambda *_: None)
    options = AddressOptions(tls_cert=cert, tls_key=key)
    assert service.new_address(paths, engine, made, options, Service(), is_there=False).cert == cert
    assert not signs_itself(cert)
