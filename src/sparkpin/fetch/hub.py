"""Repositories of models on the Hub, by huggingface_hub.

HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE, HF_HUB_OFFLINE and proxies are the library's, which reads them on import. Bytes
come over plain HTTP by ranges, which every file of the Hub answers, those in Xet, too: `hf_hub_download` removes what a
killed run brought, and hf_xet resumes nothing either, so a shard of 5 GB would begin again; and `HfFileSystem` holds
what it reads in memory, which is the complete file where a server ignores ranges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sparkpin.core.errors import NetworkError
from sparkpin.fetch.store import is_whole
from sparkpin.fetch.transfer import AGAIN, Piece, Source, Temporary, patient
from sparkpin.fetch.web import SILENCE, content_of, is_busy, lost_connections, retry_after, span_headers, without_login

UNREACHED = (
    f"{AGAIN}. HTTPS_PROXY and HF_ENDPOINT name a proxy and another Hub; files of this machine need none: name their "
    "`folder` in pins/models/ (docs/checkpoints.md)"
)
REFUSALS = {  # class of huggingface_hub.errors -> cause, next step
    "GatedRepoError": ("it is gated", "accept its terms at {hub}/{repo}, then set HF_TOKEN to that account's"),
    "RepositoryNotFoundError": ("no such repository, or a private one", "check its name, as in a pin, and HF_TOKEN"),
    "RevisionNotFoundError": (
        "no such revision",
        "choose a commit of its history, also in a pin of pins/models/",
    ),
    "RemoteEntryNotFoundError": ("no such file", "invoke lock for this model"),
    "OfflineModeIsEnabled": ("HF_HUB_OFFLINE forbids it", "unset HF_HUB_OFFLINE"),
}


class Listed(NamedTuple):
    """A file as the Hub lists it. sha256: of large ones, "" of the others."""

    file: str
    size: int
    sha256: str


class Published(NamedTuple):
    """A repository as the Hub lists it. licence: as its card has it, "" for none; gated: its files want an account that
    has accepted its terms."""

    commit: str
    files: list[Listed]
    licence: str
    gated: bool


@dataclass(frozen=True)
class HubRepository(Source):
    """A repository at a commit."""

    repo: str
    revision: str
    next_step: str = ""

    @property
    def host(self) -> str:
        from huggingface_hub import constants

        return without_login(constants.ENDPOINT)

    @property
    def name(self) -> str:
        return f"{self.repo} at {self.revision[:12]}"

    def place(self, file: str) -> str:
        return f"{file} of {self.name}"

    def cached(self, file: str) -> Path | None:
        """In the user's own cache of the Hub. ValueError for what is no repository's name."""
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.repo, file, revision=self.revision)
        return Path(path) if isinstance(path, str) else None

    def local(self, file: str, size: int) -> Path | None:
        return path if (path := self.cached(file)) and is_whole(path, size) else None

    @contextlib.contextmanager
    def open(self, piece: Piece, begin: int, *, again: bool) -> Iterator[Iterable[bytes]]:
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        headers = build_hf_headers() | span_headers(piece, begin, again=again)
        options: dict[str, Any] = {"headers": headers, "follow_redirects": True, "timeout": SILENCE}
        url = hf_hub_url(self.repo, piece.file, revision=self.revision)
        # The library's client drops the token where a redirect leaves the Hub, as it does for large files.
        with self.plain_errors(), get_session().stream("GET", url, **options) as answer:
            if answer.status_code >= 400:
                answer.read()  # for its message
            hf_raise_for_status(answer)
            yield content_of(answer, piece, begin, self.place(piece.file))

    def list_files(self) -> Published:
        """At the commit that the revision is of."""
        from huggingface_hub import HfApi

        def ask() -> Any:
            with self.plain_errors():
                return HfApi().model_info(self.repo, revision=self.revision, files_metadata=True, timeout=SILENCE)

        info = patient(ask, "the list of files")  # errors name the repository
        rows = [Listed(row.rfilename, row.size or 0, row.lfs.sha256 if row.lfs else "") for row in info.siblings or []]
        licence = next((tag.partition(":")[2] for tag in info.tags or [] if tag.startswith("license:")), "")
        return Published(str(info.sha), rows, licence, bool(info.gated))

    @contextlib.contextmanager
    def plain_errors(self) -> Iterator[None]:
        """The library's errors as NetworkError with a next step, or as Temporary where asking again helps."""
        from huggingface_hub import errors
        from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

        try:
            with lost_connections(f"{self.name}: {self.host}, or its storage of large files,", UNREACHED):
                yield
        except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled) as error:
            answer: Any = getattr(error, "response", None)
            status = 0 if answer is None else answer.status_code
            cause = f"the Hub answers {status}"
            if is_busy(status):
                limit = parse_ratelimit_headers(answer.headers)
                reset = limit.reset_in_seconds + 1.0 if limit and limit.remaining == 0 else 0
                raise Temporary(f"{self.name}: {cause}", retry_after(answer.headers) or reset) from error
            cause, step = REFUSALS.get(type(error).__name__, (cause, f"{AGAIN}; or check HF_TOKEN"))
            raise NetworkError(f"{self.name}: {cause}", next_step=step.format(hub=self.host, repo=self.repo)) from error
        except (ImportError, ValueError, TypeError, LookupError) as error:  # a kind of proxy, or a proxy's page
            cause = without_login(f"{self.name}: {error}: expected the Hub's answer, by an HTTP proxy or none")
            raise NetworkError(cause, next_step=UNREACHED) from error
