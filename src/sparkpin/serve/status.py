"""The task `status`: what is served, how it is, and why it died."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from sparkpin.core import terminal
from sparkpin.core.errors import DownError, InputError
from sparkpin.core.paths import Paths
from sparkpin.host.containers import Container, NotFound
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases.container import HOME_LABEL, log_of
from sparkpin.releases.postmortem import last_life, report
from sparkpin.releases.record import Releases
from sparkpin.serve import crash_facts, linked
from sparkpin.serve.address import endpoint
from sparkpin.serve.served import LABEL, Served, find, services
from sparkpin.serve.served import status as served_here
from sparkpin.smoke.startup import Startup

ANSWERS, STARTS = "answers", "starts"
COLUMNS = ("recipe", "release", "address", "state", "container")
LOAD_LINES = 5000  # of a log, which has vLLM's own line on its load each 10 s


@dataclass(frozen=True)
class Service:
    """A recipe's server. state: for a person."""

    served: Served
    container: Container
    state: str

    @property
    def facts(self) -> dict[str, object]:
        machines = [
            {"where": url, "state": state} for url, state in linked.states(self.served.home, self.served.recipe).items()
        ]
        return {**asdict(self.served), "url": self.served.url, "machines": machines}


def status(paths: Paths, engine: Engine, *, as_json: bool) -> None:
    """Each service of all homes, and of those that died why.

    DownError when one of this home does not answer, and is not about to.
    """
    found = [(served, find(engine, served.container)) for served in served_here(engine)]
    every = [Service(one, there, state_of(one, there)) for one, there in found if there is not None]
    if as_json:
        terminal.show_json([one.facts for one in every])
    elif every:
        terminal.table(COLUMNS, [row(paths, one) for one in every])
        for one in every:
            show_more(paths, one)
    else:
        terminal.show(f"nothing is served; next: {how_to_serve(paths)}")
    for one in every:
        if one.served.home == str(paths.home) and not one.state.startswith((ANSWERS, STARTS)):
            raise DownError(
                f"{one.served.release} is down: {one.state}",
                next_step=f"invoke logs --recipe {one.served.recipe}; invoke serve --recipe {one.served.recipe} "
                "starts it again, at its address",
            )


def row(paths: Paths, one: Service) -> tuple[str, ...]:
    served = one.served
    is_here = served.home == str(paths.home)  # the other tasks touch no other
    return (
        served.recipe if is_here else f"{served.recipe} (another home)",
        served.release.partition(":")[2],
        endpoint(served.host, served.port, tls=bool(served.cert)) + (" (key)" if served.key else ""),
        one.state,
        served.container,
    )


def show_more(paths: Paths, one: Service) -> None:
    """A line with what is not in the table; the post-mortem of one that died."""
    served = one.served
    machines = linked.states(served.home, served.recipe)
    more = [f"rank {rank} at {url}: {state}" for rank, (url, state) in enumerate(machines.items(), 1)]
    more += [f"started again {terminal.count(served.restarts, 'time')}"] if served.restarts else []
    more += [f"open besides: {', '.join(served.allow)}"] if served.allow else []
    more += [f"limits: {', '.join(f'{n}={v}' for n, v in served.limits.items())}"] if served.limits else []
    more += [load] if served.ready and (load := load_of(one.container)) else []
    current = Releases(paths).current_tag(served.recipe) if served.home == str(paths.home) else None
    more += [f"current is {current}: invoke serve serves that"] if current not in (None, served.release) else []
    if more:
        terminal.show(f"{served.recipe}: {'; '.join(more)}")
    how = crash_facts.how_ended(one.container)
    if not served.ready and (how or served.restarts):
        why = how or f"is {served.state}"
        death = crash_facts.examine(one.container, served.recipe, served.release, why)
        terminal.show("\n".join(("", *report(death))))


def load_of(container: Container) -> str:
    """vLLM's own figures of the last 10 s; "" where it has written none yet."""
    with engine_errors():
        log = last_life(bytes(container.logs(tail=LOAD_LINES))).decode(errors="replace")
    _, begin, rest = log.rpartition("Avg prompt throughput: ")
    return ", ".join(re.findall(r"Avg (?:prompt|Draft) .*", begin + rest))


def state_of(served: Served, container: Container) -> str:
    if served.ready:
        return ANSWERS
    again = f" again (number {served.restarts})" if served.restarts else ""
    if served.state == "restarting":
        return STARTS + again
    if how := crash_facts.how_ended(container):
        return f"the server {how}"
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


def how_to_serve(paths: Paths, recipe: str | None = None) -> str:
    if recipe:
        return f"invoke serve --recipe {recipe}"
    records = Releases(paths)
    is_current = any(records.promotions_path(name).is_file() for name in records.recipes())
    return "invoke serve" if is_current else "invoke up --serve"


def services_of_home(paths: Paths, engine: Engine) -> list[Container]:
    """Those of this home."""
    with engine_errors():
        return [one for one in services(engine) if one.labels.get(HOME_LABEL) == str(paths.home)]


def service_of(paths: Paths, engine: Engine, recipe: str | None) -> Container:
    """The one container of this home that is meant. InputError for none, or for more than one."""
    every = services_of_home(paths, engine)
    chosen = [one for one in every if recipe in (None, one.labels[LABEL])]
    known = ", ".join(sorted({one.labels[LABEL] for one in every}))
    if len(chosen) > 1:
        raise InputError(f"several recipes are served: {known}", next_step=f"--recipe {chosen[0].labels[LABEL]}")
    if not chosen:
        what = f"no service of recipe {recipe!r} runs" if recipe else "nothing is served"
        raise InputError(what, next_step=f"choose one of: {known}" if known else how_to_serve(paths, recipe))
    return chosen[0]
