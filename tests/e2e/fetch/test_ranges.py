"""Fetching pieces of files by byte ranges, from a real Hub on 127.0.0.1 and from the user's cache of it."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest
from hub import Fault, Request
from huggingface_hub import constants
from remote_files import BIG, DATA, MB, NOWHERE, REPO, SMALL, Remote, once, sha256
from remote_files import pauses as pauses

from sparkpin.core.errors import DiskError, IntegrityError, NetworkError
from sparkpin.fetch import transfer

WHOLE = len(DATA[BIG])
BLOBS, RESOLVE = "/blobs/", "/resolve/"


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    return Remote(tmp_path, monkeypatch)


def test_pieces_are_what_was_asked_for_and_nothing_else_is_sent(remote: Remote) -> None:
    spans, sent = [(0, 8), (7, 7), (1000, 50_000), (2 * MB, 2 * MB + 1), (WHOLE - 5, WHOLE)], list[int]()
    with remote.serve(sent=sent):
        pieces = [remote.piece(begin, end) for begin, end in spans]
        remote.fetch(pieces)
    assert all(map(remote.is_there, pieces))
    assert sum(sent) == sum(end - begin for begin, end in spans)
    assert not list(remote.out.glob("*.part"))


@pytest.mark.parametrize("at", [0, 1, 1500, MB + 7])
def test_a_cut_connection_is_taken_up_where_it_broke(remote: Remote, pauses: list[float], at: int) -> None:
    sent = list[int]()
    with remote.serve(once(Fault(cut=at)), sent=sent):
        piece = remote.piece(0, 2 * MB)
        remote.fetch([piece])
    assert remote.is_there(piece)
    assert remote.blobs == [f"bytes=0-{2 * MB - 1}", f"bytes={at}-{2 * MB - 1}"]
    assert sum(sent) == 2 * MB
    assert pauses == [1.0]


def test_a_server_that_falls_silent_is_asked_again(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkpin.fetch.hub.SILENCE", 0.3)
    ever = threading.Event()
    with remote.serve(once(Fault(cut=1000, wait=ever))):
        piece = remote.piece(0, 3000)
        remote.fetch([piece])
        ever.set()
    assert remote.is_there(piece)
    assert remote.blobs == ["bytes=0-2999", "bytes=1000-2999"]


@pytest.mark.parametrize(
    ("known", "end", "left", "asked"),
    [
        (True, 1000, DATA[BIG][:400], ["bytes=400-999"]),
        (False, 1000, bytes(400), ["bytes=0-999"]),
        (True, WHOLE, bytes(MB), [f"bytes={MB}-{WHOLE - 1}", ""]),
        (True, WHOLE, DATA[BIG], []),
        (True, WHOLE, DATA[BIG] + b"x", [""]),
    ],
    ids=["begun", "no-known-hash", "zeros-after-a-crash", "whole", "too-long"],
)
def test_what_an_earlier_run_began(remote: Remote, known: bool, end: int, left: bytes, asked: list[str]) -> None:
    """Gone on with where a hash will tell: after a loss of power the length can be right and the bytes wrong."""
    with remote.serve():
        piece = remote.piece(0, end, known=known)
        piece.part.parent.mkdir(parents=True)
        piece.part.write_bytes(left)
        remote.fetch([piece])
    assert remote.is_there(piece)
    assert remote.blobs == asked


def test_it_gives_up_after_some_tries_and_keeps_what_came(remote: Remote, pauses: list[float]) -> None:
    cuts = [Fault(cut=10)] * transfer.TRIES
    with remote.serve(once(*cuts)):
        piece = remote.piece(0, 1000)
        with pytest.raises(NetworkError, match=REPO):
            remote.fetch([piece])
        assert pauses == [1, 2, 4, 8]
        assert not piece.target.exists()
        assert piece.part.read_bytes() == DATA[BIG][: 10 * len(cuts)]
        remote.requests.clear()
        remote.fetch([piece])
    assert remote.is_there(piece)
    assert remote.blobs == [f"bytes={10 * len(cuts)}-999"]


@pytest.mark.parametrize(
    ("where", "status", "headers", "seconds"),
    [
        (BLOBS, 429, {"Retry-After": "17"}, 17),
        (RESOLVE, 429, {"RateLimit": '"resolvers";r=0;t=55'}, 56),
        (BLOBS, 503, {"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT"}, 1),
    ],
)
def test_a_busy_server_is_asked_again_when_it_wants(
    remote: Remote, pauses: list[float], where: str, status: int, headers: dict[str, str], seconds: float
) -> None:
    left = [Fault(status, headers)]
    with remote.serve(lambda request: left.pop() if left and where in request.path else None):
        piece = remote.piece(0, 1000)
        remote.fetch([piece])
    assert remote.is_there(piece)
    assert pauses == [seconds]


@pytest.mark.parametrize("code", ["", "GatedRepo", "RepoNotFound", "RevisionNotFound", "EntryNotFound"])
@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_is_not_asked_again(remote: Remote, pauses: list[float], status: int, code: str) -> None:
    with remote.serve(lambda request: Fault(status, {"X-Error-Code": code})):
        piece = remote.piece(0, 1000)
        with pytest.raises(NetworkError, match=f"{BIG} of {REPO}") as caught:
            remote.fetch([piece])
        with pytest.raises(NetworkError, match=REPO) as listing:
            remote.source.list_files()
    assert caught.value.next_step and listing.value.next_step and pauses == []


def test_a_list_of_files_that_is_none(remote: Remote) -> None:
    """As of a proxy that wants a login."""
    with remote.serve(lambda request: Fault(200)), pytest.raises(NetworkError, match=REPO) as caught:
        remote.source.list_files()
    assert caught.value.next_step


@pytest.mark.parametrize(
    "fault",
    [
        Fault(whole=True),
        Fault(headers={"Content-Range": f"bytes 0-999/{WHOLE}"}),
        Fault(headers={"Content-Range": "nonsense"}),
        Fault(headers={"Content-Encoding": "gzip"}),
    ],
)
def test_an_answer_of_other_bytes_is_noticed(remote: Remote, fault: Fault) -> None:
    with remote.serve(once(fault)), pytest.raises(NetworkError, match=f"{BIG} of {REPO}"):
        remote.fetch([remote.piece(1000, 2000)])
    assert not list(remote.out.glob("model*"))


def test_a_file_goes_on_from_a_server_without_ranges(remote: Remote) -> None:
    with remote.serve(once(Fault(cut=MB), Fault(whole=True))):
        piece = remote.piece()
        remote.fetch([piece])
    assert remote.is_there(piece)
    assert remote.blobs == ["", f"bytes={MB}-{WHOLE - 1}"]


def test_wrong_bytes_are_asked_for_once_more_and_past_caches(remote: Remote) -> None:
    """A proxy that holds wrong bytes gives them for as long as it may. A whole file needs no range."""
    wrong = Fault(wrong=True, whole=True)
    with remote.serve(lambda request: None if request.cache or BLOBS not in request.path else wrong):
        piece = remote.piece()
        remote.fetch([piece])
    assert remote.is_there(piece)
    gets = [(request.range, request.cache) for request in remote.requests if BLOBS in request.path]
    assert gets == [("", ""), ("", "no-cache")]


def test_wrong_bytes_twice_are_an_error_and_none_of_them_stays(remote: Remote) -> None:
    wanted, seen = sha256(DATA[BIG][:1000]), sha256(bytes([DATA[BIG][0] ^ 1]) + DATA[BIG][1:1000])
    with remote.serve(once(Fault(wrong=True), Fault(wrong=True))):
        piece = remote.piece(0, 1000)
        with pytest.raises(IntegrityError) as caught:
            remote.fetch([piece])
    assert all(text in caught.value.message for text in (BIG, wanted, seen))
    assert not piece.part.exists() and not piece.target.exists()


@pytest.mark.parametrize("right", [True, False])
def test_what_the_users_hub_cache_has_is_not_fetched_unless_it_is_damaged(remote: Remote, right: bool) -> None:
    repository = Path(constants.HF_HUB_CACHE) / f"models--{REPO.replace('/', '--')}"
    cached = repository / "snapshots" / remote.source.revision / BIG
    cached.parent.mkdir(parents=True)
    cached.write_bytes(DATA[BIG] if right else bytes(WHOLE))
    with remote.serve():
        pieces = [remote.piece(), remote.piece(1000, 2000)]
        remote.fetch(pieces)
    assert all(map(remote.is_there, pieces))
    assert sorted(remote.blobs) == ([] if right else ["", "bytes=1000-1999"])


def test_hf_hub_offline_asks_nobody(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with remote.serve(), pytest.raises(NetworkError, match="HF_HUB_OFFLINE"):
        remote.fetch([remote.piece()])
    assert remote.requests == []


def test_one_failure_ends_the_others_which_go_on_later(remote: Remote) -> None:
    def fault(request: Request) -> Fault | None:
        if SMALL not in request.path:
            return Fault(cut=MB, wait=ended) if BLOBS in request.path else None
        while piece.present < MB:
            time.sleep(0.01)
        return Fault(404)

    ended, piece = threading.Event(), remote.piece()
    with remote.serve(fault):
        threading.Timer(1.0, ended.set).start()
        with pytest.raises(NetworkError, match=SMALL):
            remote.fetch([piece, remote.piece(file=SMALL)])
    assert MB <= piece.part.stat().st_size < WHOLE and not piece.target.exists()
    with remote.serve():
        remote.fetch([piece])
    assert remote.is_there(piece)


def test_no_error_has_the_password_of_an_endpoint(remote: Remote) -> None:
    remote.point_at(NOWHERE.replace("://", "://me:secret@"))
    with pytest.raises(NetworkError, match=f"{REPO}.*127.0.0.1") as caught:
        remote.fetch([remote.piece()])
    assert "secret" not in str(caught.value)


def test_a_full_disk_keeps_what_came(remote: Remote, small_disk: Path) -> None:
    with remote.serve():
        remote.out = small_disk
        piece = remote.piece()
        with pytest.raises(DiskError, match="No space left on device"):
            remote.fetch([piece])
        came = piece.part.stat().st_size
        assert came > MB // 2
        subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
        remote.requests.clear()
        remote.fetch([piece])
    assert remote.is_there(piece)
    assert remote.blobs == [f"bytes={came}-{WHOLE - 1}"]
