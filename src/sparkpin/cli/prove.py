"""The task `prove`: find the server, ask it in every way, print the verdict, keep it."""

from __future__ import annotations

import contextlib
import os
import re
import ssl
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from sparkpin.build.consistent import require_consistent
from sparkpin.cli.tasks import Json, KnownRecipe, task
from sparkpin.core import terminal
from sparkpin.core.errors import CorruptionError, InputError, NetworkError, SmokeError, UntoldError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show, show_json
from sparkpin.host.engine import engine_of
from sparkpin.measure.own_server import REQUEST_SECONDS, own_server
from sparkpin.measure.prove import record, run, verdict
from sparkpin.measure.prove.record import ProveRecord
from sparkpin.measure.prove.run import Endpoint, meet
from sparkpin.pins.vllm_flags import SPECULATION
from sparkpin.releases.current import current_of
from sparkpin.releases.record import Releases
from sparkpin.serve.served import certificate_at
from sparkpin.smoke import metrics
from sparkpin.smoke.answers import Wrong
from sparkpin.smoke.client import OWN_HOSTS, Client, Fault, pinned

FOLDER = "prove"
SESSIONS, TURNS = 4, 3  # sessions, all with one beginning, and the turns of each
SEED = 1  # of their texts
URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[\w.-]+|\[[\da-f:.]+\])(:[1-9]\d{0,4})?(/[\w./~%+:-]*)?",
    re.ASCII | re.IGNORECASE,
)
UNVERIFIED = re.compile(r"certificate verify failed: (.*) \(_ssl")


@task("measure")
def prove(
    paths: Paths,
    what: Annotated[str | None, "release, or URL of an OpenAI endpoint (default: the current one)", "TAG|URL"] = None,
    *,
    recipe: KnownRecipe = None,
    model: Annotated[str, "name of the model at a URL (default: the first that it lists)"] = "",
    key_env: Annotated[str, "environment variable that holds the API key of a URL (default: none)", "NAME"] = "",
    ca: Annotated[str, "PEM file of the authority of a URL's certificate (default: the system's)", "FILE"] = "",
    json: Json = False,
) -> None:
    """Check that caching, concurrency and drafts change no answer.

    invoke prove http://127.0.0.1:8000/v1
    """
    with contextlib.ExitStack() as standing:
        if what and "://" in what:
            name, folder = what, paths.home / FOLDER / folder_of(what)
            client = standing.enter_context(at(paths, what, key_env, ca))
        else:
            release = Releases(paths).get(what, recipe) if what else current_of(paths, recipe)
            require_consistent(paths, release)
            if "--no-enable-prefix-caching" in release.argv and SPECULATION not in release.argv:
                raise unprovable(release.tag)
            name, folder = release.tag, Releases(paths).evidence(release) / FOLDER
            _, client = standing.enter_context(own_server(paths, engine_of(paths), release))
        met = meet(client, model)
        require_provable(met, name)
        found = proved(met, name, folder)
    path = record.save(folder, found)
    if json:
        show_json(asdict(found))
    else:
        report(found)
        show(f"kept: {path}")
    # The whole line is the verdict's, which stands above, or in the JSON.
    if found.verdict == "found":
        step = "send the session upstream; its file says how it is sent again"
        raise CorruptionError(f"{name}: caching, concurrency or drafting changed an answer", next_step=step)
    if found.verdict == "cannot tell":
        raise UntoldError(f"{name}: inconclusive", next_step="docs/prove.md lists what a server must report")


def parsed(url: str) -> SplitResult:
    """InputError, which does not repeat what may hold a secret, for what is no address of a server."""
    with contextlib.suppress(ValueError):  # what stands in brackets, and a port, may be none
        parts = urlsplit(url)
        if URL.fullmatch(url) and parts.port != 0:
            return parts
    cause = "the URL: expected http://HOST:PORT/v1 or https://..., without login, query and fragment"
    step = "invoke prove http://127.0.0.1:8000/v1; a key's variable is named by --key-env NAME"
    raise InputError(cause, next_step=step)


def folder_of(url: str) -> str:
    """A name for a file system."""
    place = parsed(url)
    return "-".join(filter(None, ((place.hostname or "").replace(":", "-"), str(place.port or ""))))


def key_for(url: str, variable: str) -> str | None:
    """That of the variable. A server gets a key only if it was named for it, and another machine's none in the
    clear."""
    place = parsed(url)
    if not variable:
        return None
    if not (key := os.environ.get(variable)):
        raise InputError(f"--key-env {variable}: it is not set", next_step=f"export {variable}=...")
    if place.hostname not in OWN_HOSTS and place.scheme == "http":
        cause = f"--key-env {variable}: got {url}, expected https:// for a key that goes to another machine"
        raise InputError(cause, next_step="name its https:// URL, or leave out --key-env")
    return key


@contextlib.contextmanager
def at(paths: Paths, url: str, variable: str, ca: str = "") -> Iterator[Client]:
    """A server of this data directory is known by its own certificate alone, any other by the authority that signed
    its. ca: a PEM file of that, "" for the system's."""
    key, cert = key_for(url, variable), certificate_at(paths.home, parsed(url))
    try:
        verify = pinned(cert) if cert else ssl.create_default_context(cafile=ca) if ca else True
    except OSError as error:  # ssl.SSLError is one
        raise InputError(f"--ca {ca}: {error}", next_step="name a PEM file of certificates") from None
    with Client.url(url, timeout=REQUEST_SECONDS, key=key, verify=verify) as client:
        try:
            yield client
        except (Wrong, Fault) as fault:
            if reason := UNVERIFIED.search(str(fault)):
                step = f"invoke serve, if {cert} was renewed" if cert else "name its authority with --ca FILE"
                raise NetworkError(f"{url}: its certificate is not trusted: {reason[1]}", next_step=step) from None
            step = "check that vLLM serves the model there and takes the key, then try again"
            raise SmokeError(f"{url}: {fault}", next_step=step) from None


def require_provable(met: Endpoint, name: str) -> None:
    """Before minutes of asking: UntoldError where no fault could show."""
    if met.caching is False and metrics.DraftCounts.read(met.client.metrics()) is None:
        raise unprovable(name)


def unprovable(name: str) -> UntoldError:
    return UntoldError(
        f"{name}: prefix caching is off, and nothing is drafted: no fault of either can show",
        next_step="prove one with --enable-prefix-caching, or one that drafts; on a CPU: "
        "invoke up --recipe trained-tiny --stage mtp, then invoke prove --recipe trained-tiny",
    )


def proved(met: Endpoint, name: str, folder: Path, *, sessions: int = SESSIONS) -> ProveRecord:
    proof = run.begin(met, SEED, (sessions, TURNS))
    if len(proof.turns) < 2:
        block = proof.shape.block
        cause = f"{name}: no room for two turns: a request may have {met.room} tokens, a block of its cache has {block}"
        raise UntoldError(cause, next_step="raise --max-model-len in its recipe")
    say(f"{len(proof.turns)} turns of {sessions} sessions; blocks of {proof.shape.block} tokens")
    for note in met.notes:
        say(f"note: {note}")
    proof.run()
    return verdict.conclude(proof, folder, name)


def report(found: ProveRecord) -> None:
    rows = []
    for one in found.ways:
        furthest, bound = max(one.distances, default=0.0), max(one.bounds, default=None)
        limit = "" if bound is None else f"{bound:.2g}"
        hits = "unknown" if one.hits is None else f"{one.hits:,} of {one.asked:,}"
        row = one.words, len(one.distances), f"{furthest:.2g}", limit, one.beyond or "", hits, round(one.seconds)
        rows.append(row)
    terminal.table(("asked", "answers", "furthest, nats", "bound", "beyond", "from the cache", "s"), rows)
    for note in found.notes:
        show(f"note: {note}")
    show(f"verdict: {found.line}")
