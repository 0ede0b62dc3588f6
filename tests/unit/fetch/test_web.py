"""What a server, a proxy or another source of files may do to a fetch, without a network."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import httpx
import pytest

from sparkpin.core.errors import HostError, NetworkError
from sparkpin.fetch import transfer
from sparkpin.fetch.store import Store
from sparkpin.fetch.transfer import Folder, Piece, TransferStopped, fetch_files
from sparkpin.fetch.web import Address, open_client
from sparkpin.pins.schema import LockedFile


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "gopher://127.0.0.1:9"])
def test_a_proxy_of_another_kind_is_one_clear_error(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostError, match=proxy) as caught:
        open_client(proxy)
    assert caught.value.next_step
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(HostError):
        open_client(None)


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_certificates_that_cannot_be_read_are_one_clear_error(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "ca.pem"
    if text:
        path.write_text(text)
    with pytest.raises(HostError, match=str(path)):
        open_client(None, str(path))


def test_a_file_of_which_nobody_gives_the_size() -> None:
    client = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, content=iter([b"x"]))))
    with pytest.raises(NetworkError, match="Content-Length"):
        Address(client, "http://index/a.whl").size("a.whl")


def test_a_host_that_refuses_keeps_no_other_file_from_being_fetched(tmp_path: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401 if request.url.host == "refuses" else 200, content=iter([request.url.host.encode()]))

    client, store = httpx.Client(transport=httpx.MockTransport(answer)), Store(tmp_path)
    rows = {
        host: LockedFile(
            name=host, file=f"{host}.whl", size=len(host), sha256=hashlib.sha256(host.encode()).hexdigest()
        )
        for host in ("refuses", "first", "second")
    }
    wanted = [(row, [Address(client, f"http://{host}/{row.file}")]) for host, row in rows.items()]
    with pytest.raises(NetworkError, match="401"):
        fetch_files(wanted, store, title="wheels", connections=1)
    assert [host for host, row in rows.items() if store.has(row)] == ["first", "second"]


def test_a_copy_on_this_machine_is_broken_off_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a shard from another disk, which takes minutes."""
    shard, stop = tmp_path / "model.safetensors", threading.Event()
    shard.write_bytes(bytes(3 << 20))
    piece = Piece([Folder(tmp_path, "")], shard.name, 3 << 20, 0, 3 << 20, tmp_path / "cache" / shard.name)

    def another_disk(*_: object) -> None:
        stop.set()
        raise OSError

    monkeypatch.setattr(os, "link", another_disk)
    with pytest.raises(TransferStopped):
        transfer.bring(piece, stop, set())
    assert not piece.target.exists() and not piece.present
