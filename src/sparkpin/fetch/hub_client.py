"""How the Hub is talked to: which Hub, with which token, ranges of its files, and its errors in plain words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from sparkpin.core.errors import NetworkError
from sparkpin.core.terminal import Say
from sparkpin.fetch.origins import AGAIN, SILENCE, TRIES, Temporary, check_range, patient, wanted_pause

T = TypeVar("T")

FIRST_TRIES = 4
"""Times in a row that no connection to the API may come about: 7 s of pauses, since no transfer is lost yet."""


@dataclass(frozen=True, eq=False)
class HubOrigin:
    """Files of a repository at a commit, as LFS, Xet and git keep them: all of them answer ranges over plain HTTP."""

    repo: str
    revision: str
    locations: dict[str, str] = field(default_factory=dict)
    mend: str = ""

    @property
    def name(self) -> str:
        return f"{self.repo} at {self.revision[:12]}"

    @contextlib.contextmanager
    def open(self, file: str, begin: int, end: int, size: int, *, anew: bool = False) -> Iterator[Iterator[bytes]]:
        """See `FileOrigin`. The library's own client asks: the same proxies, certificates and offline mode."""
        from huggingface_hub import get_hf_file_metadata, get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        url = hf_hub_url(self.repo, file, revision=self.revision)
        with plain_errors(self.repo, self.revision, file):
            location = None if anew else self.locations.get(file)
            if location is None:
                # A signed address that expires, or the Hub's own.
                location = self.locations[file] = get_hf_file_metadata(url, timeout=SILENCE).location
            # The token is for the Hub alone: large files lie elsewhere, under a signed address.
            own = build_hf_headers(token=None if place_of(location) == place_of(url) else False)
            headers = {**own, "Accept-Encoding": "identity", **({"Cache-Control": "no-cache"} if anew else {})}
            if (begin, end) != (0, size):
                headers["Range"] = f"bytes={begin}-{end - 1}"
            with get_session().stream(
                "GET", location, headers=headers, follow_redirects=True, timeout=SILENCE
            ) as answer:
                if answer.status_code in (401, 403) and location != url:
                    self.locations.pop(file, None)  # which another transfer may have done
                    raise Temporary(f"its address there has expired (status {answer.status_code})")
                if answer.status_code >= 400:
                    answer.read()
                hf_raise_for_status(answer)
                check_range(answer, begin, end, size, f"{file} of {self.name}")
                yield answer.iter_raw()


def place_of(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def asked(ask: Callable[[], T], repo: str, revision: str, what: str, say: Say) -> T:
    """The answer of the Hub's API, with patience."""

    def once() -> T:
        with plain_errors(repo, revision, what, tries=FIRST_TRIES):
            return ask()

    return patient(once, f"{what} of {repo} at {revision[:12]}", say)


@contextlib.contextmanager
def plain_errors(repo: str, revision: str, what: str, *, tries: int = TRIES) -> Iterator[None]:
    """The library's errors as NetworkError with a cause and a next step, or as Temporary where asking again helps."""
    from huggingface_hub import errors, get_token

    where = f"{what} of {repo} at {revision[:12]}"
    token = "" if get_token() else ", and no token is set"
    account = f"accept its terms at https://huggingface.co/{repo}, then set HF_TOKEN to that account's token"
    history = "choose a commit of its history for `revision` in pins/models/, then: invoke lock"
    known: dict[type[Exception], tuple[str, str]] = {
        errors.GatedRepoError: (f"the repository is gated{token}", account),
        errors.RepositoryNotFoundError: (
            f"no such repository, or a private one{token}",
            "check `repo` in pins/models/; for a private one set HF_TOKEN",
        ),
        errors.RevisionNotFoundError: ("the repository has no such revision", history),
        errors.OfflineModeIsEnabled: ("HF_HUB_OFFLINE forbids it", "unset HF_HUB_OFFLINE"),
        errors.RemoteEntryNotFoundError: ("the repository has no such file", "invoke lock for this model"),
    }
    try:
        yield
    except tuple(known) as error:
        cause, step = next(words for kind, words in known.items() if isinstance(error, kind))
        raise NetworkError(f"cannot fetch {where}: {cause}", next_step=step) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (408, 429) or status >= 500:
            raise Temporary(f"the Hub answers {status}", wanted_pause(error.response.headers)) from error
        raise NetworkError(
            f"cannot fetch {where}: the Hub answers {status}",
            next_step=f"{AGAIN}; on 401 or 403 check HF_TOKEN",
        ) from error
    except Exception as error:
        # httpx or httpx2: it depends on the library's version.
        lost = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2")
        if lost or isinstance(error, ConnectionError | TimeoutError):
            cause = f"the Hub does not answer (at {address(error)}: {error or type(error).__name__})"
            raise Temporary(cause, tries=tries, next_step=UNREACHED) from error
        raise


def address(error: Any) -> str:
    """Which server was asked: large files lie elsewhere than the Hub. Without what the address may say of a user."""
    from huggingface_hub import constants

    with contextlib.suppress(Exception):  # an error of httpx may have no request
        url = error.request.url
        return f"{url.scheme}://{url.host}" + (f":{url.port}" if url.port else "")
    return str(constants.ENDPOINT)


UNREACHED = (
    "check the connection, HTTPS_PROXY, and HF_ENDPOINT where another Hub is meant; then the same command again: what "
    "is there stays. Files that are on this machine need no Hub: name their `folder` in pins/models/ "
    "(docs/checkpoints.md)"
)
