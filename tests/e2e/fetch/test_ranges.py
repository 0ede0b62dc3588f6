"""Fetching pieces of files by byte ranges, from a real Hub on 127.0.0.1 and from a folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hub import Fault, Request
from remote_files import BIG, DATA, MB, REPO, SMALL, Remote, once, sha256
from remote_files import pauses as pauses

from sparkpin.core.errors import DiskError, IntegrityError, NetworkError
from sparkpin.fetch import origins


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    return Remote(tmp_path, monkeypatch)


def test_pieces_are_what_was_asked_for_and_nothing_else_is_fetched(remote: Remote) -> None:
    spans = [(0, 8), (1000, 50_000), (2 * MB, 2 * MB + 1), (len(DATA[BIG]) - 5, len(DATA[BIG]))]
    with remote.serve():
        origin = remote.origin
        pieces = [remote.piece(origin, begin, end) for begin, end in spans]
        fetched = remote.fetch(pieces)
    assert all(map(remote.is_there, pieces))
    assert fetched.sha256 == tuple(sha256(DATA[BIG][begin:end]) for begin, end in spans)
    assert fetched.received == sum(end - begin for begin, end in spans)
    assert sorted(remote.blobs) == sorted(f"bytes={begin}-{end - 1}" for begin, end in spans)
    assert not list((remote.out / "parts").iterdir())


@pytest.mark.parametrize("at", [0, 1, 1500, MB + 7])
def test_a_cut_connection_is_taken_up_where_it_broke(remote: Remote, pauses: list[float], at: int) -> None:
    with remote.serve(once(Fault(cut=at))):
        piece = remote.piece(remote.origin, 0, 2 * MB)
        fetched = remote.fetch([piece])
    assert remote.is_there(piece)
    assert remote.blobs == [f"bytes=0-{2 * MB - 1}", f"bytes={at}-{2 * MB - 1}"]
    assert fetched.received == 2 * MB
    assert pauses == [1.0]


WHOLE = len(DATA[BIG])


@pytest.mark.parametrize(
    ("known", "spans", "left", "asked"),
    [
        (True, [(0, 1000), (1000, 2000), (2000, 3000), (3000, 4000)], {2: DATA[BIG][2000:2400]},
         ["bytes=0-1999", "bytes=2400-3999"]),
        (False, [(0, 1000)], {0: bytes(400)}, ["bytes=0-999"]),
        (True, [(0, WHOLE)], {0: bytes(MB)}, [f"bytes={MB}-{WHOLE - 1}", ""]),
        (True, [(0, WHOLE)], {0: DATA[BIG]}, []),
        (True, [(0, WHOLE)], {0: DATA[BIG] + b"x"}, [""]),
    ],
    ids=["amid-others", "no-known-hash", "zeros-after-a-crash", "whole", "too-long"],
)  # fmt: skip
def test_what_an_earlier_run_began(
    remote: Remote, known: bool, spans: list[tuple[int, int]], left: dict[int, bytes], asked: list[str]
) -> None:
    """Gone on with where a hash will tell: after a loss of power the length can be right and the bytes wrong."""
    with remote.serve():
        origin = remote.origin
        pieces = [(remote.known_piece if known else remote.piece)(origin, *span) for span in spans]
        for number, data in left.items():
            pieces[number].part.parent.mkdir(parents=True)
            pieces[number].part.write_bytes(data)
        remote.fetch(pieces)
    assert all(map(remote.is_there, pieces))
    assert sorted(remote.blobs) == sorted(asked)


def test_it_gives_up_after_some_tries_and_keeps_what_came(remote: Remote, pauses: list[float]) -> None:
    cuts = [Fault(cut=10)] * origins.TRIES
    with remote.serve(once(*cuts)):
        piece = remote.known_piece(remote.origin, 0, 1000)
        with pytest.raises(NetworkError, match=REPO):
            remote.fetch([piece])
        assert pauses == [1, 2, 4, 8, 16]
        assert not piece.place("").exists()
        assert piece.part.read_bytes() == DATA[BIG][: 10 * len(cuts)]
        remote.requests.clear()
        remote.fetch([piece])
    assert remote.is_there(piece)
    assert remote.blobs == [f"bytes={10 * len(cuts)}-999"]


BLOBS, RESOLVE = "/blobs/", "/resolve/"


@pytest.mark.parametrize(
    ("where", "status", "headers", "seconds"),
    [
        (BLOBS, 429, {"Retry-After": "17"}, 17),
        (RESOLVE, 429, {"RateLimit": '"resolvers";r=0;t=55'}, 56),
        (BLOBS, 503, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 1),
        (BLOBS, 503, {"Retry-After": "86400"}, origins.LONGEST_PAUSE),
    ],
)
def test_a_busy_server_is_asked_again_when_it_wants(
    remote: Remote, pauses: list[float], where: str, status: int, headers: dict[str, str], seconds: float
) -> None:
    left = [Fault(status, headers)]
    with remote.serve(lambda request: left.pop() if left and where in request.path else None):
        piece = remote.piece(remote.origin, 0, 1000)
        remote.fetch([piece])
    assert remote.is_there(piece)
    assert pauses == [seconds]


@pytest.mark.parametrize("dropped", [False, True], ids=["one-transfer", "another-dropped-it"])
def test_an_expired_address_is_asked_for_anew_and_a_right_one_once(remote: Remote, dropped: bool) -> None:
    def expired(request: Request) -> Fault | None:
        if not request.path.endswith("Expires=1"):
            return None
        if dropped:
            origin.locations.clear()
        return Fault(403)

    with remote.serve(expired) as url:
        origin = remote.origin
        origin.locations[BIG] = f"{url}/blobs/{REPO}/{sha256(DATA[BIG])}?Expires=1"
        pieces = [remote.piece(origin, 10, 20)]
        remote.fetch(pieces)
        pieces += [remote.piece(origin, n * 100_000, n * 100_000 + 10) for n in range(1, 20)]
        remote.fetch(pieces[1:])
    assert all(map(remote.is_there, pieces))
    assert [r.method for r in remote.requests if RESOLVE in r.path] == ["HEAD"]


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (Fault(whole=True), f"the answer is 200.*'{len(DATA[BIG])}'"),
        (Fault(headers={"Content-Range": f"bytes 0-999/{len(DATA[BIG])}"}), r"206.*bytes 0-999/"),
        (Fault(headers={"Content-Range": "nonsense"}), "nonsense"),
        (Fault(headers={"Content-Encoding": "gzip"}), "gzip"),
    ],
)
def test_an_answer_of_other_bytes_is_noticed(remote: Remote, fault: Fault, seen: str) -> None:
    with remote.serve(once(fault)), pytest.raises(NetworkError, match=rf"asked for bytes 1000-1999.*{seen}"):
        remote.fetch([remote.piece(remote.origin, 1000, 2000)])
    assert not list(remote.out.glob("model*"))


def test_wrong_bytes_are_asked_for_once_more_and_past_caches(remote: Remote) -> None:
    """A proxy that holds wrong bytes gives them for as long as it may. A whole file needs no range."""
    wrong = Fault(wrong=True, whole=True)
    with remote.serve(lambda request: None if request.cache or request.method == "HEAD" else wrong):
        piece = remote.piece(remote.origin, sha256=sha256(DATA[BIG]))
        remote.fetch([piece])
    assert remote.is_there(piece)
    gets = [(request.range, request.cache) for request in remote.requests if request.method == "GET"]
    assert gets == [("", ""), ("", "no-cache")]


def test_wrong_bytes_twice_are_an_error_that_names_both_sides(remote: Remote) -> None:
    wanted, seen = sha256(DATA[BIG][:1000]), sha256(bytes([DATA[BIG][0] ^ 1]) + DATA[BIG][1:1000])
    with remote.serve(once(Fault(wrong=True), Fault(wrong=True))):
        piece = remote.piece(remote.origin, 0, 1000, sha256=wanted)
        with pytest.raises(IntegrityError) as caught:
            remote.fetch([piece])
    assert all(text in caught.value.message for text in (piece.what, wanted, seen))
    assert not piece.part.exists() and not piece.place("").exists()


def test_a_wrong_blob_of_git_is_noticed(remote: Remote) -> None:
    with remote.serve(), pytest.raises(IntegrityError, match=f"that of git blob {'0' * 40}"):
        remote.fetch([remote.piece(remote.origin, file=SMALL, git="0" * 40)])


def test_a_full_disk_keeps_what_came(remote: Remote, small_disk: Path) -> None:
    with remote.serve():
        remote.out = small_disk
        piece = remote.piece(remote.origin, sha256=sha256(DATA[BIG]))
        with pytest.raises(DiskError, match="No space left on device"):
            remote.fetch([piece])
        came = piece.part.stat().st_size
        assert came > MB // 2
        subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
        remote.requests.clear()
        remote.fetch([piece])
    assert remote.is_there(piece)
    assert remote.blobs == [f"bytes={came}-{len(DATA[BIG]) - 1}"]
