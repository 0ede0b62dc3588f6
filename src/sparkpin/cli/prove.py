"""The task `prove`: find the server, ask it in every way, print the verdict, keep it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from sparkpin.build.consistent import require_consistent
from sparkpin.cli.choose import choose_known, require_recipe
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
from sparkpin.pins.vllm_flags import SPECULATION, Flags
from sparkpin.releases.current import require_current
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke import metrics
from sparkpin.smoke.answers import Wrong
from sparkpin.smoke.client import OWN_HOSTS, Client
from sparkpin.smoke.replies import Fault

FOLDER = "prove"
KEPT = 64 << 20  # bytes: more than the log-probabilities of all passes take
KEY = "OPENAI_API_KEY"
ADDRESS = re.compile(r"([\w.-]+|\[[\da-f:.]+\]):\d{2,5}(/.*)?|[\w.-]+(/[\w.-]+)*/v1/?", re.ASCII | re.IGNORECASE)
"""A URL without its scheme. No release's tag looks so: what stands behind its colon begins with a stage's name."""

URL = re.compile(r"https?://([\w.-]+|\[[\da-f:.]+\])(:\d+)?(/[\w./~%+:-]*)?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class ProveOptions:
    """model: its name at the endpoint, "" for the first; key: variable of the environment; replay: a session's file."""

    model: str
    key: str
    seed: int
    sessions: int
    turns: int
    replay: str
    as_json: bool

    def __post_init__(self) -> None:
        for name in ("sessions", "turns"):
            if not 1 <= getattr(self, name) <= 64:
                raise InputError(
                    f"--{name}: got {getattr(self, name)}, expected 1 to 64", next_step=f"for example --{name} 4"
                )
        if self.sessions * self.turns < 2:
            raise InputError("one session of one turn has nothing to compare", next_step="leave out --turns")


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
    asked = ProveOptions(model, key_env, seed, sessions, turns, replay, json)
    paths = Paths.from_env()
    name, folder, entered = target(paths, what, recipe, asked)
    with entered as client:
        met = meet(client, asked.model)
        if asked.replay:
            show_replay(met, Path(asked.replay))
            return
        require_provable(met, name)
        found = proved(met, name, folder, asked)
    path = record.keep(folder, found)
    if asked.as_json:
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


def require_provable(met: ProvedEndpoint, name: str) -> None:
    """Before minutes of asking: UntoldError where no fault could show."""
    if met.caching is False and metrics.acceptance(met.scraped()) is None:
        raise unprovable(name, "/metrics")


def require_flags(release: Release) -> None:
    """As `require_provable`, before a server is started."""
    flags = Flags(release.argv, release.tag, {})
    if not flags.on("--enable-prefix-caching", default=True) and not flags.values(SPECULATION):
        raise unprovable(release.tag, "--no-enable-prefix-caching in its command")


def unprovable(name: str, source: str) -> UntoldError:
    return UntoldError(
        f"{name}: prefix caching is off, as {source} says, and nothing is drafted: no fault of either can show",
        next_step="prove one with --enable-prefix-caching, or one that drafts; on a CPU: "
        "invoke up --recipe trained-tiny --stage mtp, then invoke prove --recipe trained-tiny",
    )


def target(
    paths: Paths, what: str | None, recipe: str | None, asked: ProveOptions
) -> tuple[str, Path, contextlib.AbstractContextManager[Client]]:
    """Its name, the folder of its records, and the client, once the server answers."""
    if what and ADDRESS.fullmatch(what):
        scheme = "http" if ":" in what or what.partition("/")[0] in OWN_HOSTS else "https"
        raise InputError(f"{what}: got no scheme", next_step=f"invoke prove {scheme}://{what}")
    if what and "://" in what:
        folder = paths.home / FOLDER / folder_of(what)
        return what, folder, at(what, asked.key)
    release = chosen(paths, recipe, what)
    require_flags(release)
    require_consistent(paths, release)
    return release.tag, Releases(paths).evidence(release) / FOLDER, served(paths, release)


def parts_of(url: str) -> SplitResult:
    """InputError for what is no address of a server. It repeats no URL that may hold a secret: records have it, too."""
    if re.search("[@?#]", url):
        raise InputError(
            "the URL: got a login, a query or a fragment, expected host, port and path alone",
            next_step="a key belongs into a variable of the environment: --key-env NAME",
        )
    with contextlib.suppress(ValueError):  # of a port above 65535, and of half an IPv6 address
        parts = urlsplit(url)
        if URL.fullmatch(url) and parts.port != 0:
            return parts
    raise InputError(f"{url}: got no URL of a server", next_step="for example invoke prove http://127.0.0.1:8000/v1")


def folder_of(url: str) -> str:
    """A name for a file system."""
    parts = parts_of(url)
    return f"{parts.hostname}-{parts.port}".replace(":", "-") if parts.port else str(parts.hostname)


def chosen(paths: Paths, recipe: str | None, tag: str | None) -> Release:
    if tag:
        return Releases(paths).get(tag, recipe)
    name = choose_known(paths, recipe)
    require_recipe(paths, Releases(paths), name)
    return require_current(Releases(paths), name)


def key_for(url: str, variable: str) -> str | None:
    """Another machine gets a key only if it was named for it, and never in the clear."""
    parts = parts_of(url)
    own = parts.hostname in OWN_HOSTS
    key = os.environ.get(variable or KEY) if own or variable else None
    if variable and not key:
        raise InputError(f"--key-env {variable}: it is not set", next_step=f"export {variable}=...")
    if key and not own and parts.scheme == "http":
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


def proved(met: ProvedEndpoint, name: str, folder: Path, asked: ProveOptions) -> ProveRecord:
    proof = run.begun(met, asked.seed, (asked.sessions, asked.turns))
    if len(proof.turns) < 2:
        raise UntoldError(
            f"{name}: a request may have {met.room} tokens, and a block of its cache has {proof.shape.block}: no room "
            "for two turns",
            next_step="raise --max-model-len in its recipe",
        )
    say(f"{len(proof.turns)} turns of {asked.sessions} sessions; blocks of {proof.shape.block} tokens")
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
        far = max(one.distances, default=0.0)
        hits = "not told" if one.hits is None else f"{one.hits:,} of {one.asked:,}"
        limit = (
            " .. ".join(f"{bound:.2g}" for bound in sorted({min(one.bounds), max(one.bounds)})) if one.bounds else ""
        )
        rows.append((one.words, len(one.distances), f"{far:.2g}", limit, one.beyond or "", hits, f"{one.seconds:.0f}"))
    terminal.table(("asked", "answers", "furthest, nats", "bound", "beyond", "from the cache", "s"), rows)
    for note in found.notes:
        show(f"note: {note}")
    show(f"verdict: {found.line}")
