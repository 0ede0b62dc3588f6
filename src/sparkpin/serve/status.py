"""The task `status`, and what `serve` prints besides serving."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from sparkpin.core import terminal
from sparkpin.core.errors import DownError, EngineError, InputError
from sparkpin.core.paths import Paths
from sparkpin.host.containers import Container, NotFound
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases.container import HOME_LABEL, log_of
from sparkpin.releases.record import Releases
from sparkpin.serve import crash_facts, keys, linked, nodes, unit, usage
from sparkpin.serve.address import Address, AddressOptions, endpoint
from sparkpin.serve.postmortem import last_life, report
from sparkpin.serve.served import (
    LABEL,
    PROXY,
    Served,
    address_of,
    client_of,
    describe,
    find,
    kept_address,
    name_of,
    proxy_of,
    services,
)
from sparkpin.serve.served import status as served_here
from sparkpin.smoke.metrics import total
from sparkpin.smoke.startup import Startup

LOAD_SECONDS = 1.0  # between two readings of a server that has work
ANSWERS, STARTS = "answers", "starts"
NEXT = ("invoke status", "invoke logs", "invoke stop")
COLUMNS = ("recipe", "release", "address", "state", "container")


def status(paths: Paths, engine: Engine, *, as_json: bool) -> None:
    """Each service of all homes, and of those that died why.

    DownError when one of this home does not answer, and is not about to.
    """
    every = served_here(engine)
    found = {served.container: find(engine, served.container) for served in every}
    others = {served.container: linked.states(found[served.container]) for served in every}
    if as_json:
        rows = [
            {
                **asdict(served),
                "url": served.url,
                "nodes": [{"where": url, "state": state} for url, state in others[served.container].items()],
            }
            for served in every
        ]
        terminal.show_json(rows)
    elif every:
        show_all(paths, every, found, others)
    else:
        terminal.show(f"nothing is served; next: {how_to_serve(paths)}")
    for served in every:
        if served.home != str(paths.home):
            continue
        state = words(served, found[served.container])
        if not state.startswith((ANSWERS, STARTS)):
            raise DownError(
                f"{served.release} is down: {state}",
                next_step=f"invoke logs --recipe {served.recipe}; invoke serve --recipe {served.recipe} starts it "
                "anew, at its address",
            )


def show_all(
    paths: Paths,
    every: Sequence[Served],
    found: Mapping[str, Container | None],
    others: Mapping[str, Mapping[str, str]],
) -> None:
    terminal.table(COLUMNS, [row(paths, served, found[served.container]) for served in every])
    for served in every:
        more = [
            f"rank {rank} at {url}: {state}" for rank, (url, state) in enumerate(others[served.container].items(), 1)
        ]
        more += [f"started again {terminal.count(served.restarts, 'time')}"] if served.restarts else []
        more += [f"open besides: {', '.join(served.allow)}"] if served.allow else []
        more += [f"limits: {', '.join(f'{n}={v}' for n, v in served.limits.items())}"] if served.limits else []
        if now := load_of(paths, served):
            more.append(now)
        current = Releases(paths).current_tag(served.recipe) if served.home == str(paths.home) else None
        if current not in (None, served.release):
            more.append(f"current is {current}: invoke serve serves that")
        if more:
            terminal.show(f"{served.recipe}: {'; '.join(more)}")
    for served in every:
        container = found[served.container]
        if container is None or served.ready:
            continue
        how = crash_facts.how_ended(container)
        if how or served.restarts:
            why = how or f"is {served.state}"
            terminal.show("\n".join(("", *report(crash_facts.examine(container, served.recipe, served.release, why)))))


def load_of(paths: Paths, served: Served) -> str:
    """As `usage.usage_line`; "" for a server that does not tell, or of another home."""
    from sparkpin.smoke.replies import Fault  # slow to import

    if not served.ready or served.home != str(paths.home):
        return ""
    path = keys.path_of(paths, served.recipe)
    key = path.read_text(encoding="utf-8").strip() if served.key and path.is_file() else None
    with client_of(served, key) as client, contextlib.suppress(Fault):
        read = [(time.monotonic(), client.get("/metrics").body.decode(errors="replace"))]
        time.sleep(LOAD_SECONDS if total(read[0][1], usage.RUNNING) else 0.01)
        read.append((time.monotonic(), client.get("/metrics").body.decode(errors="replace")))
        return usage.usage_line(read[0][1], read[1][1], read[1][0] - read[0][0])
    return ""


def how_to_serve(paths: Paths, recipe: str | None = None) -> str:
    """Of a recipe; None: of this machine's default one, or of the only one that has a current release.

    Where nobody knows a recipe of that name, what lists those there are.
    """
    records = Releases(paths)
    if recipe is None:
        current = [name for name in records.recipes() if records.promotions_path(name).is_file()]
        if not current:
            return "invoke up --serve"
        recipe = current[0] if len(current) == 1 else None
    elif recipe not in records.recipes() and not (paths.project / f"recipes/{recipe}.yaml").is_file():
        return "invoke recipe list"
    return f"invoke serve --recipe {recipe}" if recipe else "invoke serve"


def row(paths: Paths, served: Served, container: Container | None) -> tuple[str, ...]:
    own = served.home == str(paths.home)  # the other tasks touch no other
    return (
        served.recipe if own else f"{served.recipe} (another home)",
        served.release.partition(":")[2],
        endpoint(served.host, served.port, tls=served.tls) + (" (key)" if served.key else ""),
        words(served, container),
        served.container,
    )


def words(served: Served, container: Container | None) -> str:
    """What a person wants to know of the state."""
    if served.ready:
        return ANSWERS
    again = f" again (number {served.restarts})" if served.restarts else ""
    if served.state == "restarting":
        return STARTS + again
    if served.state != "running" or container is None:
        return f"the server is {served.state}"
    if served.health == "unhealthy":
        return f"hangs: {crash_facts.last_check(container.attrs['State'])}"
    watched = Startup()
    with engine_errors():
        try:
            watched.update(last_life(log_of(container)), 0)
        except NotFound:  # another run has just put a new one in its place
            return STARTS + again
    if not watched.ready:
        return f"{STARTS}{again}: {watched.text}"
    if served.proxy != "running":
        return f"the proxy is {served.proxy or 'gone'}, the server runs"
    return "gives no answer"


def own_services(paths: Paths, engine: Engine) -> list[Container]:
    """Those of this home, the newest first: in a switch a recipe has two."""
    with engine_errors():
        own = [one for one in services(engine) if one.labels.get(HOME_LABEL) == str(paths.home)]
    return sorted(own, key=lambda one: str(one.attrs["Created"]), reverse=True)


def service_of(paths: Paths, engine: Engine, recipe: str | None) -> Container:
    """The one container of this home that is meant. InputError for none, or for more than one."""
    own = own_services(paths, engine)
    chosen = [one for one in own if recipe in (None, one.labels[LABEL])]
    known = ", ".join(sorted({one.labels[LABEL] for one in own}))
    if len({one.labels[LABEL] for one in chosen}) > 1:
        raise InputError(f"several recipes are served: {known}", next_step=f"--recipe {chosen[0].labels[LABEL]}")
    if not chosen:
        what = f"no service of recipe {recipe!r} runs" if recipe else "nothing is served"
        raise InputError(what, next_step=f"choose one of: {known}" if known else how_to_serve(paths, recipe))
    return chosen[0]


OWN = Path(__file__).resolve()


def show_unit(paths: Paths, recipe: str, options: AddressOptions) -> None:
    """The unit to standard output, what to do with it to standard error."""
    front = None
    with contextlib.suppress(EngineError):  # the unit is to serve as it is served now
        front = find(Engine.connect(), name_of(paths, recipe) + PROXY)
    if known := address_of(front) or kept_address(paths, recipe):
        options = options.applied(known).options
    options.applied(Address())  # InputError for a value that is none
    system = os.geteuid() == 0
    # `invoke` runs the tasks.py of the folder; that of another checkout need not fit this code.
    program = "invoke" if OWN.is_relative_to(paths.project) else "sparkpin"
    env = {"SPARKPIN_HOME": str(paths.home), "SPARKPIN_CACHE": str(paths.cache)}  # systemd has no shell's XDG_DATA_HOME
    env |= {"SPARKPIN_PROJECT": str(paths.project)} if program == "sparkpin" else {}  # named: it may be another user's
    env |= {name: os.environ[name] for name in ("DOCKER_HOST",) if os.environ.get(name)}
    others = its.urls[1:] if (its := nodes.kept(paths, recipe)) else ()
    text = unit.unit_text(
        recipe=recipe,
        invoke=Path(sys.executable).parent / program,
        project=paths.project,
        env=env,
        arguments=options.words,
        system=system,
        nodes=others,
    )
    sys.stdout.write(text)
    for line in unit.how_to_install(recipe, system=system):
        terminal.say(line)
    for url in others:
        terminal.say(f"at {url}: sudo systemctl enable docker  # its container starts with it, and waits for this one")


def told(paths: Paths, served: Served, cert: str = "", context: int | None = None, scripted: bool = False) -> list[str]:
    """What to say once a server answers. cert: of its TLS; context: tokens; scripted: its answers are a script."""
    found = [f"{served.release} answers at {served.url}" + (f", {context} tokens of context" if context else "")]
    if scripted:
        found.append(f"the model {served.model} is scripted: its answers are a script, and show the path alone")
    if served.key:
        found.append(f"other machines reach it; the key that it wants is in {keys.path_of(paths, served.recipe)}")
    from sparkpin.serve.client_formats import found_here  # slow to import

    clients = [f"invoke client {name}" for name in found_here()]
    return [*found, f"try it: {curl_line(paths, served, cert)}", f"next: {', '.join([*clients, *NEXT])}"]


def curl_line(paths: Paths, served: Served, cert: str) -> str:
    """For a shell of this machine. The key comes by a pipe: `ps` shows curl's arguments to every user."""
    body = json.dumps({"model": served.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60})
    words = ["curl", *(["--cacert", shlex.quote(cert)] if signs_itself(cert) else []), *(["-H @-"] * bool(served.key))]
    words += ["-H 'Content-Type: application/json'", "-d", shlex.quote(body)]  # --json: not in curl of Ubuntu 22.04
    key = shlex.quote(str(keys.path_of(paths, served.recipe)))
    given = f"""printf 'Authorization: Bearer %s' "$(cat {key})" | """ if served.key else ""
    return given + " ".join([*words, f"{served.url}/chat/completions"])


def signs_itself(cert: str) -> bool:
    """Whether clients have to be told to trust it."""
    asked = ["openssl", "verify", "-CAfile", cert, cert]
    return bool(cert) and subprocess.run(asked, capture_output=True).returncode == 0


def show_env(paths: Paths, engine: Engine, recipe: str | None) -> None:
    """Lines for `eval "$(...)"`, with the key: for a shell, and no file."""
    container = service_of(paths, engine, recipe)
    served = describe(container, front := proxy_of(engine, container))
    address, path = address_of(front), keys.path_of(paths, served.recipe)
    if served.key and not path.is_file():
        raise InputError(
            f"{served.recipe} wants a key, and {path} is not there", next_step="invoke serve makes the server a new one"
        )
    key = path.read_text(encoding="utf-8").strip() if served.key else "not-needed"  # the libraries want one
    said = {"OPENAI_BASE_URL": served.url, "OPENAI_API_KEY": key, "OPENAI_MODEL": served.model}
    if address and signs_itself(address.cert):
        said["SSL_CERT_FILE"] = address.cert
    for name, value in said.items():
        terminal.show(f"export {name}={shlex.quote(value)}")
