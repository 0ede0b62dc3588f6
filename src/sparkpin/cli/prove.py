"""The task `prove`: find the server, ask it in every way, print the verdict, keep it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from sparkpin.build.consistent import require_consistent
from sparkpin.cli.choose import current_of
from sparkpin.cli.options import Json, KnownRecipe
from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.errors import CorruptionError, InputError, SmokeError, UntoldError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show, show_json
from sparkpin.host.engine import engine_of
from sparkpin.measure.own_server import REQUEST_SECONDS, own_server
from sparkpin.measure.prove import record, run, session, verdict
from sparkpin.measure.prove.asking import ProvedEndpoint, meet
from sparkpin.measure.prove.record import ProveRecord
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke import metrics
from sparkpin.smoke.answers import Wrong
from sparkpin.smoke.client import OWN_HOSTS, Client
from sparkpin.smoke.replies import Fault

FOLDER = "prove"
KEPT = 64 << 20  # bytes: more than the log-probabilities of all passes take
KEY = "OPENAI_API_KEY"
URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[\w.-]+|\[[\da-f:.]+\])(:(?P<port>[1-9]\d{0,4}))?(/[\w./~%+:-]*)?",
    re.ASCII | re.IGNORECASE,
)


@task("measure")
def prove(
    what: Annotated[
        str | None, "tag of a release, or URL of an OpenAI endpoint (default: the recipe's current release)", "TAG|URL"
    ] = None,
    *,
    recipe: KnownRecipe = None,
    model: Annotated[str, "name of the model at a URL (default: the first that it lists)"] = "",
    key_env: Annotated[
        str, "variable with the API key of a URL (default: on this machine OPENAI_API_KEY)", "NAME"
    ] = "",
    sessions: Annotated[int, "how many, all with one beginning (default: 4)"] = 4,
    turns: Annotated[int, "of each (default: 3)"] = 3,
    seed: Annotated[int, "of the texts (default: 1)"] = 1,
    replay: Annotated[
        str, "send the session of a file that an earlier run wrote, and say whether it differs", "FILE"
    ] = "",
    json: Json = False,
) -> None:
    """Check that caching, concurrency and drafting do not change answers."""
    if sessions * turns < 2:
        raise InputError("one session of one turn has nothing to compare", next_step="leave out --sessions and --turns")
    paths = Paths.from_env()
    server: contextlib.AbstractContextManager[Client]
    if what and "://" in what:
        name, folder, server = what, paths.home / FOLDER / folder_of(what), at(what, key_env)
    else:
        release = Releases(paths).get(what, recipe) if what else current_of(paths, recipe)
        require_consistent(paths, release)
        name, folder, server = release.tag, Releases(paths).evidence(release) / FOLDER, served(paths, release)
    with server as client:
        met = meet(client, model)
        if replay:
            show_replay(met, Path(replay))
            return
        require_provable(met, name)
        found = proved(met, name, folder, seed=seed, count=(sessions, turns))
    path = record.keep(folder, found)
    if json:
        show_json(record.to_json(found))
    else:
        report(found)
        show(f"kept: {path}")
    # The whole line is the verdict's, which stands above, or in the JSON.
    if found.verdict == "found":
        raise CorruptionError(
            f"{name}: caching, concurrency or drafting changed an answer",
            next_step="send the session upstream; invoke prove URL --replay FILE repeats it",
        )
    if found.verdict == "cannot tell":
        raise UntoldError(f"{name}: inconclusive", next_step="docs/prove.md lists what a server must report")


def parts_of(url: str) -> re.Match[str]:
    """InputError, which does not repeat what may hold a secret, for what is no address of a server."""
    parts = URL.fullmatch(url)
    if not parts or int(parts["port"] or 1) > 65535:
        raise InputError(
            "the URL: expected http://HOST:PORT/v1 or https://..., without login, query and fragment",
            next_step="invoke prove http://127.0.0.1:8000/v1; a key's variable is named by --key-env NAME",
        )
    return parts


def folder_of(url: str) -> str:
    """A name for a file system."""
    parts = parts_of(url)
    return "-".join(filter(None, (parts["host"].strip("[]").replace(":", "-").lower(), parts["port"])))


def key_for(url: str, variable: str) -> str | None:
    """Another machine gets a key only if it was named for it, and never in the clear."""
    parts = parts_of(url)
    own = parts["host"].strip("[]").lower() in OWN_HOSTS
    key = os.environ.get(variable or KEY) if own or variable else None
    if variable and not key:
        raise InputError(f"--key-env {variable}: it is not set", next_step=f"export {variable}=...")
    if key and not own and parts["scheme"].lower() == "http":
        raise InputError(
            f"--key-env {variable}: got {url}, expected https:// for a key that goes to another machine",
            next_step="name its https:// URL, or leave out --key-env",
        )
    return key or None


@contextlib.contextmanager
def at(url: str, variable: str) -> Iterator[Client]:
    with Client.url(url, timeout=REQUEST_SECONDS, key=key_for(url, variable)) as client:
        try:
            yield client
        except (Wrong, Fault) as fault:
            raise SmokeError(
                f"{url}: {fault}", next_step="check that vLLM serves the model there and takes the key, then try again"
            ) from None


@contextlib.contextmanager
def served(paths: Paths, release: Release) -> Iterator[Client]:
    with own_server(paths, engine_of(paths), release, KEPT) as own:
        yield own.client


def require_provable(met: ProvedEndpoint, name: str) -> None:
    """Before minutes of asking: UntoldError where no fault could show."""
    if met.caching is False and metrics.acceptance(met.scraped()) is None:
        raise UntoldError(
            f"{name}: prefix caching is off, as /metrics says, and nothing is drafted: no fault of either can show",
            next_step="prove one with --enable-prefix-caching, or one that drafts; on a CPU: "
            "invoke up --recipe trained-tiny --stage mtp, then invoke prove --recipe trained-tiny",
        )


def proved(met: ProvedEndpoint, name: str, folder: Path, *, seed: int, count: tuple[int, int]) -> ProveRecord:
    """count: sessions, and turns of each."""
    proof = run.begun(met, seed, count)
    if len(proof.turns) < 2:
        raise UntoldError(
            f"{name}: a request may have {met.room} tokens, and a block of its cache has {proof.shape.block}: no room "
            "for two turns",
            next_step="raise --max-model-len in its recipe",
        )
    say(f"{len(proof.turns)} turns of {count[0]} sessions; blocks of {proof.shape.block} tokens")
    for note in met.notes:
        say(f"note: {note}")
    proof.run()
    return verdict.concluded(proof, folder, name)


def show_replay(met: ProvedEndpoint, path: Path) -> None:
    """CorruptionError where a session's file shows its difference again."""
    sent = session.read(path)
    far = session.repeated(met, sent)
    line = f"{path}: {far:.2g} nats; {sent.bound:.2g} may be rounding; it was {sent.difference:.2g}"
    if far > sent.bound:
        raise CorruptionError(f"seen again: {line}", next_step="send the session upstream")
    show(f"not seen again: {line}")


def report(found: ProveRecord) -> None:
    rows = []
    for one in found.passes:
        hits = "unknown" if one.hits is None else f"{one.hits:,} of {one.asked:,}"
        furthest, bound = max(one.distances, default=0.0), max(one.bounds, default=None)
        limit = "" if bound is None else f"{bound:.2g}"
        rows.append(
            (one.words, len(one.distances), f"{furthest:.2g}", limit, one.beyond or "", hits, round(one.seconds))
        )
    terminal.table(("asked", "answers", "furthest, nats", "bound", "beyond", "from the cache", "s"), rows)
    for note in found.notes:
        show(f"note: {note}")
    show(f"verdict: {found.line}")
