"""Repositories of models: on the Hub, by huggingface_hub, or in a folder of this machine that stands for one.

HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE, HF_HUB_OFFLINE and proxies are the library's, which reads them on import. Bytes
come over plain HTTP by ranges, which every file of the Hub answers, those in Xet, too: `hf_hub_download` removes what a
killed run brought, and hf_xet resumes nothing either, so a shard of 5 GB would begin again; and `HfFileSystem` holds
what it reads in memory, which is the complete file where a server ignores ranges.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, TypeVar

from sparkpin.core import files
from sparkpin.core.errors import IntegrityError, NetworkError
from sparkpin.core.terminal import Say

T = TypeVar("T")
NEVER = Event()
At = Callable[[], int]

TRIES = 6  # failures in a row, with 31 s of pauses between them, after which a transfer is given up
LIST_TRIES = 4  # with 7 s of pauses: no transfer is lost yet
MOVED = 1 << 20  # bytes that must have arrived for a broken connection to count as the first one again
SILENCE = 30.0  # seconds without an answer, or between two chunks of it, after which a connection counts as broken
LONGEST_PAUSE = 600.0  # seconds; the Hub counts requests in windows of five minutes
AGAIN = "check the connection, then run the same command again: what has arrived is kept"
UNREACHED = (
    f"{AGAIN}. HTTPS_PROXY and HF_ENDPOINT name a proxy and another Hub; files of this machine need none: name their "
    "`folder` in pins/models/ (docs/checkpoints.md)"
)
REFUSALS = {  # class of huggingface_hub.errors -> cause, next step
    "GatedRepoError": ("it is gated{token}", "accept its terms at {hub}/{repo}, then set HF_TOKEN to that account's"),
    "RepositoryNotFoundError": (
        "no such repository, or a private one{token}",
        "check `repo` in the pin, and HF_TOKEN",
    ),
    "RevisionNotFoundError": ("no such revision", "choose a commit of its history in pins/models/, then: invoke lock"),
    "RemoteEntryNotFoundError": ("no such file", "invoke lock for this model"),
    "OfflineModeIsEnabled": ("HF_HUB_OFFLINE forbids it", "unset HF_HUB_OFFLINE"),
}


class Temporary(Exception):
    """A failure that may pass. after: seconds that the server asks us to wait; next_step: if it does not pass."""

    def __init__(self, cause: str, after: float = 0, *, next_step: str = AGAIN) -> None:
        super().__init__(cause)
        self.after, self.next_step = after, next_step


class TransferStopped(Exception):
    """Another transfer failed, or a person stopped the run."""


class Listed(NamedTuple):
    """A file as the Hub lists it. sha256: of large ones; git: git's blob hash of the others."""

    file: str
    size: int
    sha256: str
    git: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """A repository at a commit. folder: where its files lie, which are only read; None for the Hub.

    next_step: what to do about a wrong file in a person's folder; "" for one that is made here and removed again.
    """

    repo: str
    revision: str
    folder: Path | None = None
    next_step: str = ""

    @property
    def name(self) -> str:
        return str(self.folder or f"{self.repo} at {self.revision[:12]}")

    def local(self, file: str, size: int) -> Path | None:
        """A file of the folder, or of the user's own cache of the Hub, which is only read, too."""
        path: Any = self.folder and self.folder / file
        if not path:
            from huggingface_hub import try_to_load_from_cache

            path = try_to_load_from_cache(self.repo, file, revision=self.revision)
        return Path(path) if isinstance(path, str | Path) and is_whole(Path(path), size) else None

    @contextlib.contextmanager
    def open(self, file: str, begin: int, end: int, size: int, *, again: bool = False) -> Iterator[Iterable[bytes]]:
        """The bytes `begin` to `end` of a file of `size` bytes, in chunks; fewer if the connection breaks, more if the
        server lies.

        again: past caches, because what arrived was wrong. Raises Temporary, also in the body of the context,
        NetworkError, and IntegrityError for a file that is not in the folder.
        """
        path = self.local(file, size)
        if path and (self.folder or not again):
            yield read_span(path, begin, end)
            return
        if self.folder:
            message = f"{self.folder / file}: no such file, or one of another size than {size} bytes"
            raise IntegrityError(message, next_step=self.next_step or AGAIN)
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        headers |= {"Cache-Control": "no-cache"} if again else {}
        headers |= {"Range": f"bytes={begin}-{end - 1}"} if (begin, end) != (0, size) else {}
        # The library's client drops the token where a redirect leaves the Hub, as it does for large files.
        ask = functools.partial(get_session().stream, follow_redirects=True, timeout=SILENCE)
        url = hf_hub_url(self.repo, file, revision=self.revision)
        with self.plain_errors(file), ask("GET", url, headers=headers) as answer:
            if answer.status_code >= 400:
                answer.read()  # for its message
            hf_raise_for_status(answer)
            yield content_of(answer, begin, end, size, f"{file} of {self.name}")

    def list_files(self, say: Say) -> tuple[str, list[Listed]]:
        """Of the Hub: the commit that the revision is of, and its files."""
        from huggingface_hub import HfApi

        def ask() -> Any:
            with self.plain_errors("the list of files"):
                return HfApi().model_info(self.repo, revision=self.revision, files_metadata=True, timeout=SILENCE)

        what = f"the list of files of {self.name}"
        try:
            info = patient(ask, what, say, tries=LIST_TRIES)
        except (ValueError, TypeError, LookupError) as error:  # as of a page of a proxy's
            cause = f"cannot fetch {what}: got something else ({error}), expected the Hub's answer"
            raise NetworkError(cause, next_step=UNREACHED) from error
        found = [(row, row.lfs.sha256 if row.lfs else "") for row in info.siblings or []]
        return str(info.sha), [
            Listed(row.rfilename, row.size or 0, sha256, "" if sha256 else row.blob_id or "") for row, sha256 in found
        ]

    @contextlib.contextmanager
    def plain_errors(self, what: str) -> Iterator[None]:
        """The library's errors as NetworkError with a next step, or as Temporary where asking again helps."""
        from huggingface_hub import constants, errors, get_token

        hub = constants.ENDPOINT.rpartition("@")[2]  # an address may have a password
        try:
            yield
        except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled) as error:
            answer: Any = getattr(error, "response", None)
            status = 0 if answer is None else answer.status_code
            cause = f"the Hub answers {status}"
            if status in (408, 429) or status >= 500:
                raise Temporary(cause, pause_of(answer.headers)) from error
            token = "" if get_token() else ", and no token is set"
            texts = REFUSALS.get(type(error).__name__, (cause, f"{AGAIN}; or check HF_TOKEN"))
            words = [text.format(hub=hub, repo=self.repo, token=token) for text in texts]
            raise NetworkError(f"cannot fetch {what} of {self.name}: {words[0]}", next_step=words[1]) from error
        except Exception as error:
            # httpx or httpx2: it depends on the library's version.
            is_lost = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2")
            if not is_lost and not isinstance(error, ConnectionError | TimeoutError):
                raise
            cause = f"{hub}, or its storage of large files, does not answer ({error or type(error).__name__})"
            raise Temporary(cause, next_step=UNREACHED) from error


def is_whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def read_span(path: Path, begin: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end and (chunk := file.read(min(end - begin, files.CHUNK))):
            begin += len(chunk)
            yield chunk


def content_of(answer: Any, begin: int, end: int, size: int, what: str) -> Iterator[bytes]:
    """The bytes `begin` to `end` of a file of `size` bytes from an answer of httpx; NetworkError where it has others.

    A server that ignores ranges sends the complete file. Its start is dropped where the file's rest is wanted, and only
    there: 5 GB are too much for the 3 MB of a tensor.
    """
    names = ("Content-Range", "Content-Length", "Content-Encoding")
    has = {name: answer.headers[name] for name in names if name in answer.headers}
    skip, fits = begin, end == size and has.get("Content-Length", str(size)) == str(size)
    if answer.status_code == 206:
        skip, fits = 0, has.get("Content-Range", "") in [f"bytes {begin}-{end - 1}/{total}" for total in (size, "*")]
    if not fits or has.get("Content-Encoding", "identity") != "identity":
        got, expected = f"status {answer.status_code} with {has}", f"bytes {begin}-{end - 1} of {size}"
        step = "the server, or a proxy before it, ignores byte ranges: fetch past that proxy (NO_PROXY)"
        raise NetworkError(f"cannot fetch {what}: got {got}, expected {expected}", next_step=step)
    for chunk in answer.iter_raw():
        if rest := chunk[skip:]:
            yield rest
        skip = max(0, skip - len(chunk))


def pause_of(headers: Mapping[str, str]) -> float:
    """Seconds that an overloaded server asks us to wait; 0 where it does not say."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    limit = parse_ratelimit_headers(headers)
    return retry_after(headers) or (limit.reset_in_seconds + 1.0 if limit and limit.remaining == 0 else 0)


def retry_after(headers: Mapping[str, str]) -> float:
    value = headers.get("Retry-After", "").strip()
    with contextlib.suppress(ValueError, OverflowError):
        return float(value) if value.isdecimal() else parsedate_to_datetime(value).timestamp() - time.time()
    return 0


def patient(
    ask: Callable[[], T], what: str, say: Say, *, tries: int, stop: Event = NEVER, at: Callable[[], int] = int
) -> T:
    """Ask until there is an answer; NetworkError after `tries` failures in a row. at: bytes that have arrived."""
    failures, before = 0, at()
    while True:
        try:
            pause(stop, 0)
            return ask()
        except Temporary as error:
            failures, before = 1 if at() - before >= MOVED else failures + 1, at()
            if failures >= tries:
                message = f"cannot fetch {what}: {error} ({failures} times in a row)"
                raise NetworkError(message, next_step=error.next_step) from error
            seconds = min(max(error.after, 2.0 ** (failures - 1)), LONGEST_PAUSE)
            say(f"{what}: {error}; asking again in {seconds:.0f} s")
            pause(stop, seconds)


def pause(stop: Event, seconds: float) -> None:
    if stop.wait(seconds):
        raise TransferStopped
