"""What clients reach a server by: options, certificates, what a front may not do any more."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from certificates import certificate
from places import PROJECT

from sparkpin.core.errors import InputError
from sparkpin.serve import closed_in, tls
from sparkpin.serve.address import Address, AddressOptions
from sparkpin.serve.rules import Limits


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
        "0.0.0.0",
        8001,
        f"{tmp_path}/c.pem",
        f"{tmp_path}/k.pem",
        ("/score", "/v2/embed"),
        Limits(requests=7, restarts=1),
    )
    assert AddressOptions().applied(first) == first == Address.read(first.text)
    back = AddressOptions(tls_cert="none", allow="none", limit="none").applied(first)
    assert back == Address("0.0.0.0", 8001)
    assert first.options.applied(Address(port=3, allow=("/x",))) == first and back.options.applied(first) == back
    for text in ('{"limits": {"new": 1}, "allow": []}', first.text.replace("host", "other"), "[]", "{"):
        with pytest.raises(InputError, match="another version"):
            Address.read(text)
    words = AddressOptions(port=1, tls_cert="c", tls_key="k").words
    assert words == ("--port", "1", "--tls-cert", f"{tmp_path}/c", "--tls-key", f"{tmp_path}/k")


WRONG = (
    {"tls_cert": "c.pem"},
    {"tls_key": "k.pem"},
    {"tls_cert": "none", "tls_key": "k.pem"},
    {"tls_cert": "", "tls_key": ""},
    *({"allow": text} for text in ("", "score", "/", "/a b", "/../x", "/a/./b", "/a?b", "/a,", "//a", "/a\n")),
    *({"limit": text} for text in ("", "x=1", "requests", "requests=0", "requests=-1", "requests=1.5", "requests=x")),
)


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_a_value_that_is_none(options: dict[str, str]) -> None:
    with pytest.raises(InputError, match="--"):
        AddressOptions(**options).applied(Address())  # type: ignore[arg-type]


def test_a_certificate_is_tried_before_it_is_used(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path / "one")
    other = certificate(tmp_path / "other")
    locked = tmp_path / "locked.key"
    subprocess.run(["openssl", "rsa", "-in", key, "-aes128", "-passout", "pass:x", "-out", locked], check=True)
    text = tmp_path / "text.pem"
    text.write_text("none\n")
    assert tls.read(cert, key) == tls.Tls(Path(cert).read_bytes(), Path(key).read_bytes())
    for pair, why in {
        (cert, other[1]): "another certificate",
        (cert, str(locked)): "--tls-key",
        (cert, str(tmp_path / "absent")): "No such file",
        (str(text), key): "--tls-cert .*BEGIN CERTIFICATE",
        (cert, str(text)): "--tls-key .*BEGIN PRIVATE KEY",
        (cert, str(tmp_path)): "Is a directory",
    }.items():
        with pytest.raises(InputError, match=why) as caught:
            tls.read(*pair)
        assert any(file in caught.value.message for file in pair) and "openssl" in caught.value.next_step


CLOSED = """
import ctypes, socket
from sparkpin.serve.closed_in import SOCKETS, no_more_sockets
elsewhere, door = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(door.getsockname())
taken, _ = door.accept()
spare, datagram = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
datagram.connect(elsewhere.getsockname())  # what is to be refused works before
no_more_sockets()
assert ctypes.CDLL(None).connect(taken.fileno(), bytes(4), 4) == 0  # AF_UNSPEC: it is no connection any more
own = socket.socket(socket.AF_UNIX)
try:
    own.connect(f"{SOCKETS}/a/s")
except FileNotFoundError:
    print("unix")
socket.socketpair()
for link in (taken, spare, datagram):
    try:
        link.connect(elsewhere.getsockname())
    except PermissionError:
        print("connect")
for family, kind in ((2, 1), (2, 2), (10, 1), (10, 2), (16, 3), (17, 3)):
    try:
        socket.socket(family, kind)
    except PermissionError:
        print("socket")
"""


def test_a_process_that_has_closed_itself_in_reaches_unix_sockets_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSED],
        env={"PYTHONPATH": str(PROJECT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["unix", *["connect"] * 3, *["socket"] * 6]


@pytest.mark.parametrize("machine", closed_in.SYSTEMS)
def test_the_filter_leads_each_call_to_its_end(machine: str) -> None:
    """By a reading of classic BPF of our own: this machine runs that of one architecture alone."""
    steps = [struct.unpack_from("=HBBI", closed_in.program(machine), at) for at in range(0, 13 * 8, 8)]
    system, socket_call, connect_call = closed_in.SYSTEMS[machine]

    def end(call: int, first: int = 0, third: int = 0, of: int = system) -> bool:
        data = {closed_in.NUMBER: call, closed_in.SYSTEM: of, closed_in.FIRST: first, closed_in.THIRD: third}
        at = held = 0
        while True:
            code, yes, no, value = steps[at]
            if code == closed_in.RETURN:
                return value == closed_in.ALLOW
            if code == closed_in.LOAD:
                held, at = data[value], at + 1
            else:
                at += 1 + (yes if (held == value if code == closed_in.EQUAL else held >= value) else no)

    assert end(0) and end(socket_call, 1) and end(connect_call, 2, 13)
    assert not any((end(socket_call, 2), end(socket_call, 10), end(connect_call, 2, 16), end(connect_call, 2, 28)))
    assert not any((end(425), end(closed_in.X32 | 1), end(0, of=0x40000003)))
