"""How the Hub is talked to: which Hub, with which token, one file at a time, and its errors in plain words."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sparkpin import files
from sparkpin.errors import ManifestError, NetworkError
from sparkpin.paths import Paths
from sparkpin.schema import ModelPin

Say = Callable[[str], None]

PROGRESS_SECONDS = 5.0


def download(
    staging: Path, repo: str, revision: str, name: str, url: str | None, say: Say, is_right: Callable[[Path], bool]
) -> Path:
    """The path, in `staging`, of one file as the Hub gives it; the caller tells what to do if it still is not right.

    A wrong file is asked for once more, past the library's own cache: what it holds there, it would give for ever.
    """
    staged = _download(staging, repo, revision, name, url, say, force=False)
    if is_right(staged):
        return staged
    say(f"{name} of {repo} arrived with wrong bytes: asking the Hub for it once more")
    return _download(staging, repo, revision, name, url, say, force=True)


def _download(staging: Path, repo: str, revision: str, name: str, url: str | None, say: Say, *, force: bool) -> Path:
    from huggingface_hub import hf_hub_download

    # The library never takes up again what a killed run left; it would only fill the disk.
    for left in (staging / ".cache").rglob("*.incomplete"):
        left.unlink(missing_ok=True)
    with (
        files.disk_errors(staging),
        plain_errors(repo, revision, name),
        progress(staging, name, say),
    ):
        staging.mkdir(parents=True, exist_ok=True)
        return Path(
            hf_hub_download(
                repo,
                name,
                revision=revision,
                local_dir=staging,
                endpoint=url,
                token=token_for(url),
                tqdm_class=silent_bar(),
                force_download=force,
            )
        )


def silent_bar() -> type[Any]:
    """The library's progress bar, never drawn: progress goes through `say`."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    def init(self: Any, *args: Any, **options: Any) -> None:
        tqdm.__init__(self, *args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    return type("Silent", (tqdm,), {"__init__": init})


@contextlib.contextmanager
def progress(staging: Path, name: str, say: Say) -> Iterator[None]:
    """Tell the size of the unfinished file now and then. Measured on disk: the same for every way of transfer."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(PROGRESS_SECONDS):
            sizes = [0]
            for path in (staging / ".cache").rglob("*.incomplete"):
                with contextlib.suppress(OSError):
                    sizes.append(path.stat().st_size)
            say(f"fetching {name}: {max(sizes) / 1e6:.1f} MB so far")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def token_for(url: str | None) -> bool | None:
    """None: the library's own rules (HF_TOKEN, then what `hf auth login` stored). Never to a Hub of our own."""
    return None if url is None else False


@contextlib.contextmanager
def endpoint(paths: Paths, pin: ModelPin, say: Say) -> Iterator[str | None]:
    """The Hub to ask: None for the public one (or HF_ENDPOINT), or a local one that serves a generated model."""
    if pin.generator is None:
        yield None
        return
    from sparkpin import tinymodel
    from sparkpin.tinymodel import hub as local_hub

    work = paths.work / f"model-{pin.name}"
    with files.disk_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        files.sweep(work)
        folder = Path(tempfile.mkdtemp(prefix=files.PARTIAL, dir=work))
    try:
        say(f"generating {pin.name}")
        with files.disk_errors(folder):
            tinymodel.generate(folder, seed=pin.generator.seed)
        with local_hub.serve(folder) as url, no_proxy():
            check_generated(paths, pin, url)
            yield url
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_generated(paths: Paths, pin: ModelPin, url: str) -> None:
    """The generator gives the pinned commits: it is part of what the pin freezes."""
    from huggingface_hub import HfApi

    path = paths.project / f"pins/models/{pin.name}.yaml"
    made: dict[str, str | None] = {}
    for key, repository in pin.repositories.items():
        with plain_errors(repository.repo, "main", "its commit"):
            made[key] = HfApi(endpoint=url, token=False).model_info(repository.repo).sha
    changed = {key: sha for key, sha in made.items() if sha != pin.repositories[key].revision}
    for key, sha in changed.items():
        commits = ", ".join(f"repositories.{name}.revision to {commit}" for name, commit in changed.items())
        raise ManifestError(
            path,
            f"repositories.{key}.revision",
            pin.repositories[key].revision,
            f"{sha}, which the generator makes here",
            next_step=f"if the generator was changed on purpose, set {commits} in {path} (and model_revision in the "
            f"recipes of this model), then: invoke lock --model {pin.name}",
        )


@contextlib.contextmanager
def no_proxy() -> Iterator[None]:
    """Reach 127.0.0.1 directly even where HTTP_PROXY is set: the library's client reads the environment when made."""
    from huggingface_hub import close_session

    names = ("NO_PROXY", "no_proxy")
    before: Mapping[str, str | None] = {name: os.environ.get(name) for name in names}
    listed = next((value for value in before.values() if value), "")
    close_session()
    os.environ.update(dict.fromkeys(names, f"{listed},127.0.0.1".lstrip(",")))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        close_session()


@contextlib.contextmanager
def plain_errors(repo: str, revision: str, what: str) -> Iterator[None]:
    """Turn the library's errors into NetworkError with a cause and a next step."""
    from huggingface_hub import errors

    where = f"{what} of {repo} at {revision[:12]}"
    again = "check the connection, then run the same command again: what is there stays"
    try:
        yield
    except errors.GatedRepoError as error:
        raise NetworkError(
            f"cannot fetch {where}: the repository is gated",
            next_step=f"accept its terms at https://huggingface.co/{repo}, then set HF_TOKEN to that account's token",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise NetworkError(
            f"cannot fetch {where}: no such repository, or a private one",
            next_step="check `repo` in pins/models/; for a private one set HF_TOKEN",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise NetworkError(
            f"cannot fetch {where}: the repository has no such revision",
            next_step="choose a commit of its history for `revision` in pins/models/, then: invoke lock",
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise NetworkError(
            f"cannot fetch {where}: HF_HUB_OFFLINE forbids it", next_step="unset HF_HUB_OFFLINE"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise NetworkError(
            f"cannot fetch {where}: the repository has no such file", next_step="invoke lock for this model"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise NetworkError(f"cannot fetch {where}: the Hub does not answer", next_step=again) from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "no status")
        raise NetworkError(
            f"cannot fetch {where}: the Hub answers {status}",
            next_step=f"{again}; on 401 or 403 check HF_TOKEN",
        ) from error
    except Exception as error:
        # httpx or httpx2 (it depends on the library's version), Xet, and OSError without an errno.
        lost = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2")
        lost = lost or isinstance(error, errors.XetDownloadError | ConnectionError | TimeoutError)
        if lost or (isinstance(error, OSError) and error.errno is None):
            raise NetworkError(f"cannot fetch {where}: {error or type(error).__name__}", next_step=again) from error
        raise
