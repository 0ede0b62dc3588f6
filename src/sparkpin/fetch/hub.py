"""The Hub by huggingface_hub: its lists, byte ranges of its files, the user's own cache of it, and errors that name a
next step. HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE, HF_HUB_OFFLINE and proxies are the library's: it reads them on import.

Bytes come over plain HTTP by ranges, which every file of the Hub answers, those in Xet, too. `hf_hub_download` removes
what a killed run brought and hf_xet resumes nothing either, so a shard of 5 GB would begin again; both fetch complete
files only; and `HfFileSystem` holds what it reads in memory, which is the complete file where a server ignores ranges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, errors, get_session, get_token, hf_hub_url, try_to_load_from_cache
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from sparkpin.core.errors import NetworkError
from sparkpin.core.terminal import Say
from sparkpin.fetch.transfer import AGAIN, SILENCE, Temporary, content_of, patient, pause_of, read_span

LIST_TRIES = 4  # with 7 s of pauses: no transfer is lost yet
UNREACHED = (
    "check the connection, HTTPS_PROXY, and HF_ENDPOINT where another Hub is meant; then the same command again: what "
    "has arrived is kept. Files that are on this machine need no Hub: name their `folder` in pins/models/ "
    "(docs/checkpoints.md)"
)
ACCOUNT = "accept its terms at {hub}/{repo}, then set HF_TOKEN to that account's token"
HISTORY = "choose a commit of its history for `revision` in pins/models/, then: invoke lock"
REFUSALS: dict[type[Exception], tuple[str, str]] = {  # -> cause and next step; the first that fits
    errors.GatedRepoError: ("the repository is gated{token}", ACCOUNT),
    errors.RepositoryNotFoundError: (
        "no such repository, or a private one{token}",
        "check `repo` in pins/models/; for a private one set HF_TOKEN",
    ),
    errors.RevisionNotFoundError: ("the repository has no such revision", HISTORY),
    errors.RemoteEntryNotFoundError: ("the repository has no such file", "invoke lock for this model"),
    errors.OfflineModeIsEnabled: ("HF_HUB_OFFLINE forbids it", "unset HF_HUB_OFFLINE"),
}


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A `Source`: a repository at a commit."""

    repo: str
    revision: str
    next_step = ""

    @property
    def name(self) -> str:
        return f"{self.repo} at {self.revision[:12]}"

    def local(self, file: str, size: int) -> Path | None:
        """The file in HF_HUB_CACHE, if it is there. Its bytes are verified as all others are."""
        found = try_to_load_from_cache(self.repo, file, revision=self.revision)
        return Path(found) if isinstance(found, str) and Path(found).stat().st_size == size else None

    @contextlib.contextmanager
    def open(self, file: str, begin: int, end: int, size: int, *, again: bool = False) -> Iterator[Iterable[bytes]]:
        """See `Source`. The library's client drops the token where a redirect leaves the Hub, as for large files."""
        if not again and (path := self.local(file, size)):
            yield read_span(path, begin, end)
            return
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        headers |= {"Cache-Control": "no-cache"} if again else {}
        headers |= {"Range": f"bytes={begin}-{end - 1}"} if (begin, end) != (0, size) else {}
        url = hf_hub_url(self.repo, file, revision=self.revision)
        with (
            plain_errors(self, file),
            get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=SILENCE) as answer,
        ):
            if answer.status_code >= 400:
                answer.read()  # for its message
            hf_raise_for_status(answer)
            yield content_of(answer, begin, end, size, f"{file} of {self.name}")

    def list_files(self, say: Say) -> tuple[str, list[tuple[str, int, str, str]]]:
        """The commit that the revision is of, and its files: path, size, SHA-256 of a large file, git's blob hash of
        another."""

        def ask() -> Any:
            with plain_errors(self, "the list of files"):
                return HfApi().model_info(self.repo, revision=self.revision, files_metadata=True, timeout=SILENCE)

        info = patient(ask, f"the list of files of {self.name}", say, tries=LIST_TRIES)
        rows = [
            (row.rfilename, row.lfs.size, row.lfs.sha256, "")
            if row.lfs
            else (row.rfilename, row.size or 0, "", row.blob_id or "")
            for row in info.siblings or []
        ]
        return str(info.sha), rows


@contextlib.contextmanager
def plain_errors(source: HubRepository, what: str) -> Iterator[None]:
    """The library's errors as NetworkError with a cause and a next step, or as Temporary where asking again helps."""
    try:
        yield
    except tuple(REFUSALS) as error:
        words = next(words for kind, words in REFUSALS.items() if isinstance(error, kind))
        token = "" if get_token() else ", and no token is set"
        cause, step = (text.format(hub=constants.ENDPOINT, repo=source.repo, token=token) for text in words)
        raise NetworkError(f"cannot fetch {what} of {source.name}: {cause}", next_step=step) from error
    except errors.HfHubHTTPError as error:
        status, cause = error.response.status_code, f"the Hub answers {error.response.status_code}"
        if status in (408, 429) or status >= 500:
            raise Temporary(cause, pause_of(error.response.headers)) from error
        step = f"{AGAIN}; on 401 or 403 check HF_TOKEN"
        raise NetworkError(f"cannot fetch {what} of {source.name}: {cause}", next_step=step) from error
    except Exception as error:
        # httpx or httpx2: it depends on the library's version.
        is_lost = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2")
        if not is_lost and not isinstance(error, ConnectionError | TimeoutError):
            raise
        servers = f"{constants.ENDPOINT}, or the storage of its large files"
        cause = f"the Hub does not answer (at {servers}: {error or type(error).__name__})"
        raise Temporary(cause, next_step=UNREACHED) from error
