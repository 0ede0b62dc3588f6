"""The task `status`: what is served, how it is, and why it died."""

from __future__ import annotations

import re
from pathlib import Path

from sparkpin.core import terminal
from sparkpin.core.errors import DownError, InputError
from sparkpin.core.paths import Paths
from sparkpin.host.containers import Container, NotFound
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases.container import how_ended, log_of
from sparkpin.releases.postmortem import last_life, report
from sparkpin.releases.record import Releases
from sparkpin.serve import crash_facts, linked
from sparkpin.serve.served import LABEL, Served, services, try_read
from sparkpin.serve.served import status as served_here
from sparkpin.smoke.startup import Startup

ANSWERS, STARTS = "answers", "starts"
COLUMNS = ("recipe", "release", "address", "state", "container")
LOAD_LINES = 5000  # of a log, which has vLLM's own line on its load each 10 s


def status(paths: Paths, engine: Engine, recipe: str | None = None, *, as_json: bool) -> None:
    """Each service of all homes, or of one recipe, and of those that died why.

    InputError for a recipe that is none; DownError when one of this home does not answer, and is not about to.
    """
    every = [one for one in served_here(engine) if recipe in (None, one.recipe)]
    if recipe and not every:
        from sparkpin.pins import manifests  # slow to import

        manifests.load_recipe(paths.project, recipe)
    states = [state_of(one) for one in every]
    if as_json:
        terminal.show_json([facts_of(one) for one in every])
    elif every:
        terminal.table(COLUMNS, [row(paths, one, state) for one, state in zip(every, states, strict=True)])
        for one in every:
            show_more(paths, one)
    else:
        terminal.show(f"nothing is served{f' of {recipe}' if recipe else ''}; next: {how_to_serve(paths, recipe)}")
    for one, state in zip(every, states, strict=True):
        if one.home == str(paths.home) and not state.startswith((ANSWERS, STARTS)):
            raise DownError(
                f"{one.release} is down: {state}",
                next_step=f"invoke logs --recipe {one.recipe}; invoke serve --recipe {one.recipe} "
                "starts it again, at its address",
            )


def facts_of(served: Served) -> dict[str, object]:
    machines = [{"where": url, "state": state} for url, state in linked.states(served.home, served.recipe).items()]
    names = ("home", "recipe", "release", "container", "model", "url", "ready", "health", "restarts", "started")
    return {
        **{name: getattr(served, name) for name in names},
        **served.address.model_dump(exclude={"limits", "tls_key"}),
        "key": not served.address.is_local,
        "limits": served.address.limits.model_dump(exclude_defaults=True),
        "state": served.server.status,
        "proxy": served.proxy.status if served.proxy else "",
        "machines": machines,
    }


def row(paths: Paths, served: Served, state: str) -> tuple[str, ...]:
    is_here = served.home == str(paths.home)  # the other tasks touch no other
    return (
        served.recipe if is_here else f"{served.recipe} (another home)",
        served.release.partition(":")[2],
        served.address.url + ("" if served.address.is_local else " (key)"),
        state,
        served.container,
    )


def show_more(paths: Paths, served: Served) -> None:
    """A line with what is not in the table; the post-mortem of one of this home that died since `serve` had an answer
    of it."""
    machines, limits = linked.states(served.home, served.recipe), served.address.limits
    more = [f"rank {rank} at {url}: {state}" for rank, (url, state) in enumerate(machines.items(), 1)]
    more += [f"started again {terminal.count(served.restarts, 'time')}"] if served.restarts else []
    more += [f"open besides: {', '.join(served.address.allow)}"] if served.address.allow else []
    changed = limits.model_dump(exclude_defaults=True)
    more += [f"limits: {', '.join(f'{n}={v}' for n, v in changed.items())}"] if changed else []
    more += [load] if served.ready and (load := load_of(served.server)) else []
    current = Releases(paths).current_tag(served.recipe) if served.home == str(paths.home) else None
    more += [f"current is {current}: invoke serve serves that"] if current not in (None, served.release) else []
    if more:
        terminal.show(f"{served.recipe}: {'; '.join(more)}")
    how = how_ended(served.server)
    if served.home == str(paths.home) and not served.ready and (how or died_since_answer(served)):
        why = how or f"is {served.server.status}"
        death = crash_facts.examine(served.server, served.recipe, served.release, why)
        terminal.show("\n".join(("", *report(death))))


def died_since_answer(served: Served) -> bool:
    """Whether Docker has started it again since `serve` had an answer of it; also where its end has no time."""
    ended = crash_facts.moment(served.state.get("FinishedAt", ""))
    return bool(served.restarts) and ended > try_read(Path(served.home), served.recipe).answered


def load_of(container: Container) -> str:
    """vLLM's own figures of the last 10 s; "" where it has written none yet."""
    with engine_errors():
        log = last_life(bytes(container.logs(tail=LOAD_LINES))).decode(errors="replace")
    _, begin, rest = log.rpartition("Avg prompt throughput: ")
    return ", ".join(re.findall(r"Avg (?:prompt|Draft) .*", begin + rest))


def state_of(served: Served) -> str:
    """For a person."""
    if served.ready:
        return ANSWERS
    again = f" again (number {served.restarts})" if served.restarts else ""
    if served.server.status == "restarting":
        return STARTS + again
    if how := how_ended(served.server):
        return f"the server {how}"
    if served.health == "unhealthy":
        return f"hangs: {crash_facts.last_check(served.state)}"
    watched = Startup()
    with engine_errors():
        try:
            watched.update(last_life(log_of(served.server)), 0)
        except NotFound:  # another run has just put a new one in its place
            return STARTS + again
    if not watched.ready:
        return f"{STARTS}{again}: {watched.text}"
    proxy = served.proxy.status if served.proxy else "gone"
    return f"the proxy is {proxy}, the server runs" if proxy != "running" else "gives no answer"


def how_to_serve(paths: Paths, recipe: str | None = None) -> str:
    if recipe:
        return f"invoke serve --recipe {recipe}"
    records = Releases(paths)
    is_current = any(records.promotions_path(name).is_file() for name in records.recipes())
    return "invoke serve" if is_current else "invoke up --serve"


def service_of(paths: Paths, engine: Engine, recipe: str | None) -> Container:
    """The one container of this home that is meant. InputError for none, or for more than one."""
    every = services(engine, paths.home)
    chosen = [one for one in every if recipe in (None, one.labels[LABEL])]
    known = ", ".join(sorted({one.labels[LABEL] for one in every}))
    if len(chosen) > 1:
        raise InputError(f"several recipes are served: {known}", next_step=f"--recipe {chosen[0].labels[LABEL]}")
    if not chosen:
        what = f"no service of recipe {recipe!r} runs" if recipe else "nothing is served"
        raise InputError(what, next_step=f"choose one of: {known}" if known else how_to_serve(paths, recipe))
    return chosen[0]
