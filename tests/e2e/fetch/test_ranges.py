"""Fetching pieces of files by byte ranges, from a real Hub on 127.0.0.1 and from a folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import hub
import pytest
from hub import Fault, Request
from remote_files import BIG, DATA, MB, REPO, SMALL, Remote, once, sha256
from remote_files import pauses as pauses

from sparkpin.core.errors import DiskError, IntegrityError, NetworkError
from sparkpin.core.files import git_blob_sha1
from sparkpin.fetch import origins, transfer
from sparkpin.fetch.hub_client import HubOrigin
from sparkpin.fetch.origins import FolderOrigin
from sparkpin.fetch.pieces import FilePiece, Growing, joined


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


@pytest.mark.parametrize(
    ("spans", "asked"),
    [
        ([(3000, 4000), (0, 1000), (2000, 3000), (1000, 2000), (2000, 2000)], ["bytes=0-3999"]),
        ([(7, 7)], []),
        ([(0, MB), (MB + 100, MB + 100)], [f"bytes=0-{MB - 1}"]),
    ],
    ids=["side-by-side", "empty", "empty-behind-a-gap"],
)
def test_pieces_that_go_together_are_one_request(
    remote: Remote, spans: list[tuple[int, int]], asked: list[str]
) -> None:
    with remote.serve():
        origin = remote.origin
        pieces = [remote.piece(origin, begin, end) for begin, end in spans]
        remote.fetch(pieces)
    assert all(map(remote.is_there, pieces))
    assert remote.blobs == asked


def test_small_gaps_are_bridged_while_they_cost_less_than_one_percent(remote: Remote) -> None:
    """Of 1.5 MB: five gaps of 1000 bytes are bridged, the larger ones are not."""
    gaps, at, spans = [1000, 60_000, 1000, 1000, 1000, 1000], 0, []
    for gap in [*gaps, 0]:
        spans.append((at, at + 200_000))
        at += 200_000 + gap
    with remote.serve():
        origin = remote.origin
        pieces = [remote.piece(origin, begin, end) for begin, end in spans]
        fetched = remote.fetch(pieces)
    assert all(map(remote.is_there, pieces))
    assert len(remote.blobs) == 2
    assert fetched.received == 7 * 200_000 + 5000


def test_joined_requests_stay_small_enough_to_share(tmp_path: Path) -> None:
    origin = FolderOrigin(tmp_path)
    step = 20 * MB
    pieces = [
        FilePiece(origin, "f", 200 * MB, n * step, (n + 1) * step, "", tmp_path / str(n), lambda s: tmp_path)
        for n in range(10)
    ]
    assert sorted(len(span) for span in joined(pieces)) == [1, 3, 3, 3]


def test_what_lies_in_git_comes_from_the_hub_itself(remote: Remote) -> None:
    with remote.serve():
        whole = remote.piece(remote.origin, file=SMALL, git=git_blob_sha1(DATA[SMALL]))
        part = remote.piece(remote.origin, 2, 5, file=SMALL)
        remote.fetch([whole, part])
    assert remote.is_there(whole) and remote.is_there(part)
    assert not remote.blobs


@pytest.mark.parametrize("at", [0, 1, 1500, MB + 7])
def test_a_cut_connection_is_taken_up_where_it_broke(remote: Remote, pauses: list[float], at: int) -> None:
    with remote.serve(once(Fault(cut=at))):
        piece = remote.piece(remote.origin, 0, 2 * MB)
        fetched = remote.fetch([piece])
    assert remote.is_there(piece)
    assert remote.blobs == [f"bytes=0-{2 * MB - 1}", f"bytes={at}-{2 * MB - 1}"]
    assert fetched.received == 2 * MB
    assert pauses == [1.0]
    assert any(f"the connection broke after {at:,} of" in line or "peer closed" in line for line in remote.said)


def test_a_cut_amid_joined_pieces_keeps_those_that_are_whole(remote: Remote) -> None:
    with remote.serve(once(Fault(cut=2500))):
        origin = remote.origin
        pieces = [remote.piece(origin, n * 1000, (n + 1) * 1000) for n in range(4)]
        remote.fetch(pieces)
    assert all(map(remote.is_there, pieces))
    assert remote.blobs == ["bytes=0-3999", "bytes=2500-3999"]


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
    begun = any("are there from an earlier run" in line for line in remote.said)
    assert begun == (known and left[min(left)] != DATA[BIG] + b"x")


class Short(FolderOrigin):
    """Ends early and says nothing, once: what a Hub's answer cannot do, since its length is told."""

    @contextlib.contextmanager
    def open(self, file: str, begin: int, end: int, size: int, *, anew: bool = False) -> Iterator[Iterator[bytes]]:
        with FolderOrigin.open(self, file, begin, end if begin else end // 2, size) as chunks:
            yield chunks


def test_an_answer_that_ends_early_is_a_broken_connection(remote: Remote, pauses: list[float]) -> None:
    piece = remote.piece(Short(remote.root / REPO), 0, 1000)
    remote.fetch([piece])
    assert remote.is_there(piece)
    assert pauses == [1.0]
    assert any("the connection broke after 500 of 1,000 bytes" in line for line in remote.said)


def test_it_gives_up_after_some_tries_and_keeps_what_came(remote: Remote, pauses: list[float]) -> None:
    cuts = [Fault(cut=10)] * origins.TRIES
    with remote.serve(once(*cuts)):
        piece = remote.known_piece(remote.origin, 0, 1000)
        with pytest.raises(NetworkError, match=rf"{REPO} at .*\(6 times in a row\)") as caught:
            remote.fetch([piece])
        assert "the same command again: what is there stays" in caught.value.next_step
        assert pauses == [1, 2, 4, 8, 16]
        assert not piece.place("").exists()
        assert piece.part.read_bytes() == DATA[BIG][: 10 * len(cuts)]
        remote.requests.clear()
        remote.fetch([piece])
    assert remote.is_there(piece)
    assert remote.blobs == [f"bytes={10 * len(cuts)}-999"]


def test_a_connection_that_breaks_often_but_moves_is_never_given_up(
    remote: Remote, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origins, "MOVED", 1000)
    with remote.serve(once(*[Fault(cut=1000)] * 20)):
        piece = remote.piece(remote.origin, 0, 30_000)
        remote.fetch([piece])
    assert remote.is_there(piece)
    assert pauses == [1.0] * 20


BLOBS, RESOLVE = "/blobs/", "/resolve/"


@pytest.mark.parametrize(
    ("where", "status", "headers", "seconds"),
    [
        (BLOBS, 429, {"Retry-After": "17"}, 17),
        (RESOLVE, 429, {"Retry-After": "17"}, 17),
        (RESOLVE, 429, {"RateLimit": '"resolvers";r=0;t=55'}, 56),
        (BLOBS, 503, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 1),
        (BLOBS, 503, {"Retry-After": "86400"}, origins.LONGEST_PAUSE),
        (BLOBS, 500, {}, 1),
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


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_file_is_told_also_where_its_address_has_expired(remote: Remote, status: int) -> None:
    with remote.serve(lambda request: Fault(status, {"X-Error-Code": "GatedRepo"})) as url:
        known = {BIG: f"{url}/blobs/{REPO}/{sha256(DATA[BIG])}"} if status == 401 else {}
        with pytest.raises(NetworkError, match="is gated") as caught:
            remote.fetch([remote.piece(HubOrigin(REPO, remote.revision, known))])
    assert f"https://huggingface.co/{REPO}" in caught.value.next_step


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (Fault(whole=True), f"the answer is 200.*'{len(DATA[BIG])}'"),
        (Fault(headers={"Content-Range": f"bytes 0-999/{len(DATA[BIG])}"}), r"206.*bytes 0-999/"),
        (Fault(headers={"Content-Range": "bytes 1000-1999/7"}), r"206.*bytes 1000-1999/7"),
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
    assert f"{piece.what} of {REPO} at {remote.revision[:12]}" in caught.value.message
    assert f"wanted size=1000, sha256={wanted}; got size=1000, sha256={seen}" in caught.value.message
    assert caught.value.next_step == "do something"
    assert not piece.part.exists() and not piece.place("").exists()


def test_a_wrong_blob_of_git_is_noticed(remote: Remote) -> None:
    with remote.serve(), pytest.raises(IntegrityError, match=f"that of git blob {'0' * 40}"):
        remote.fetch([remote.piece(remote.origin, file=SMALL, git="0" * 40)])


def test_a_part_that_a_killed_run_made_read_only_can_be_written_to(remote: Remote) -> None:
    """Looked at in the mode's bits: root, who may run this, may write into any file."""
    piece = remote.piece(FolderOrigin(remote.root / REPO))
    piece.part.parent.mkdir(parents=True)
    piece.part.write_bytes(DATA[BIG][:1000])
    piece.part.chmod(0o444)
    Growing(piece, fresh=False).close()
    assert piece.part.stat().st_mode & 0o777 == 0o644


def test_several_files_come_at_once(remote: Remote) -> None:
    """The server holds every answer back until all have been asked for."""
    count, all_there = 6, threading.Event()
    arrived: set[str] = set()

    def hold(request: Request) -> Fault | None:
        if request.path.startswith("/blobs/"):
            arrived.add(request.range)
            if len(arrived) == count:
                all_there.set()
            return Fault(wait=all_there, cut=0)
        return None

    with remote.serve(hold):
        origin = remote.origin
        pieces = [remote.piece(origin, n * 200_000, n * 200_000 + 10) for n in range(count)]
        remote.fetch(pieces)
    assert all(map(remote.is_there, pieces))
    assert all_there.is_set()


def test_the_first_failure_stops_the_others_and_keeps_what_is_whole(remote: Remote) -> None:
    never = threading.Event()

    def fault(request: Request) -> Fault | None:
        if "bytes=1000-" in request.range:
            return Fault(404)
        if "bytes=500000-" in request.range:
            return Fault(cut=100, wait=never)
        return None

    with remote.serve(fault):
        origin = remote.origin
        good = remote.piece(origin, 0, 10)
        remote.fetch([good])
        stuck = threading.Timer(0.5, never.set)
        stuck.start()
        with pytest.raises(NetworkError, match="the Hub answers 404"):
            remote.fetch([remote.piece(origin, 1000, 2000), remote.piece(origin, 500_000, 700_000)])
        stuck.join()
    assert remote.is_there(good)
    assert [path.name for path in (remote.out / "parts").iterdir() if path.stat().st_size] in (
        [],
        [f"{BIG}.500000-700000.part"],
    )


def test_a_failure_ends_a_fetch_of_more_requests_than_connections(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CONNECTIONS", 1)
    failures: list[BaseException] = []

    def fetch(pieces: list[FilePiece]) -> None:
        try:
            remote.fetch(pieces)
        except NetworkError as error:
            failures.append(error)

    with remote.serve(lambda request: Fault(404) if request.method == "GET" else None):
        origin = remote.origin
        pieces = [remote.piece(origin, n * 100_000, n * 100_000 + 10) for n in range(20)]
        thread = threading.Thread(target=fetch, args=[pieces], daemon=True)
        thread.start()
        thread.join(60)
    assert not thread.is_alive()
    assert len(failures) == 1
    assert len(remote.blobs) < 20


def test_progress_tells_bytes_rate_and_what_is_left(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PROGRESS_SECONDS", 0.01)
    told = threading.Event()

    def say(line: str) -> None:
        if "1.0 of 2.1 MB" in line and line.endswith(" left"):
            told.set()

    with remote.serve(once(Fault(cut=MB, wait=told))):
        piece = remote.piece(remote.origin, 0, 2 * MB)
        transfer.fetch([piece], say, title="fetching", advice="")
    assert told.is_set()


# VmHWM is of this program; what getrusage tells begins with the memory of the one that started it.
LARGE = """
import re, sys
from pathlib import Path
from sparkpin.fetch import transfer as ranges
from sparkpin.fetch.hub_client import HubOrigin
from sparkpin.fetch.pieces import FilePiece
revision, size, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
origin = HubOrigin("acme/large", revision)
pieces = [
    FilePiece(origin, "large.safetensors", size, b, e, "", out / f"{b}-{e}.part", lambda s, b=b, e=e: out / f"{b}-{e}")
    for b, e in [(0, size), (0, size // 2), (size // 2, size)]
]
fetched = ranges.fetch(pieces, print, title="", advice="")
print(fetched.received, re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def test_memory_does_not_grow_with_what_is_fetched(tmp_path: Path) -> None:
    size = 150 * MB
    folder = tmp_path / "remote/acme/large"
    folder.mkdir(parents=True)
    with (folder / "large.safetensors").open("wb") as file:
        file.truncate(size)
    revision = hub.scan(folder, "acme/large").commit
    with hub.serve(tmp_path / "remote") as url:
        words = [sys.executable, "-c", LARGE, revision, str(size), str(tmp_path / "out")]
        done = subprocess.run(words, env={**os.environ, "HF_ENDPOINT": url}, capture_output=True, text=True, check=True)
    received, peak = map(int, done.stdout.splitlines()[-1].split())
    assert received == 2 * size
    assert peak * 1024 < 100 * MB


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
