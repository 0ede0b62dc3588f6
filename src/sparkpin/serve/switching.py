"""From one server of a recipe to the next without a lost request, and back when the next fails. A real request is the
only proof that one is ready."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sparkpin.core import files
from sparkpin.core.errors import SmokeError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, say
from sparkpin.host.containers import Container, NotFound
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases import container as running
from sparkpin.releases.inside import PROMPT
from sparkpin.releases.postmortem import report
from sparkpin.releases.record import Release
from sparkpin.serve import crash_facts, launch, linked, memory_limit
from sparkpin.serve import proxy as proxies
from sparkpin.serve import served as records
from sparkpin.serve.address import Address, key_of, read_tls
from sparkpin.serve.cluster import Machine
from sparkpin.serve.linked import Part
from sparkpin.serve.memory_limit import Room
from sparkpin.serve.proxy import ProxyOrder
from sparkpin.serve.served import Served, Service, is_running
from sparkpin.smoke.startup import NotReady, StartFault, wait_for_answer

DRAIN_SECONDS = 30  # for requests under way
ANSWER_SECONDS = 60.0
LAST_START = "last-start"  # a file: seconds until the last server of a recipe answered
ASK_SECONDS = 15.0  # between two requests while the log does not say that it answers: each starts a program


class Detached(Exception):
    """The person does not wait any longer; the server goes on starting. The text says what runs."""


@dataclass(frozen=True)
class Switch:
    """wanted: what is to be served; known: what is served again where that does not answer. machines: those that are
    reached, by URL; parts: of the server that is there; same: it is the wanted one, and runs; room: memory of the
    wanted one; drain: seconds that requests under way get."""

    paths: Paths
    engine: Engine
    recipe: str
    wanted: Service
    known: Service
    machines: Mapping[str, Machine]
    parts: Sequence[Part]
    same: bool
    room: Room | None
    drain: float

    @property
    def name(self) -> str:
        return records.name_of(self.paths, self.recipe)

    def carry_out(self) -> Served:
        """New requests wait at the proxy until the new server answers. What does not become ready is removed, and the
        old one is started again.

        Detached where nobody waits until it is ready."""
        order, parts = self.wanted.orders[0], self.parts
        try:
            self.note(self.begun)
            proxy = self.bring_proxy(self.wanted, self.drain)
            if self.same:
                say(f"{order.release.tag} already runs as {self.name}")
            else:
                with proxies.shut(proxy):
                    self.end_old(proxy)
                    parts = self.create(self.wanted)
                if self.room:
                    memory_limit.make_room(self.room, order.release)
                linked.start(parts)
            ready = self.await_ready(parts)
            linked.keep_up(parts, self.wanted.orders)
        except BaseException:
            try:
                self.go_back()
            except SparkpinError as error:  # why the new one failed is what matters
                say(f"warning: nothing answers: {error.message}")
            raise
        if not ready:
            raise Detached(f"{self.name} continues to start {order.release.tag}")
        self.note(lambda record: record.model_copy(update={"former": None, "answered": time.time()}))
        return self.look(parts[0])

    def begun(self, record: Service) -> Service:
        """SmokeError where a `stop` came after `serve` has read the record: what it stopped is not to come back."""
        if self.known.orders and not record.orders:
            tag = self.wanted.orders[0].release.tag
            raise SmokeError(f"{self.name} was stopped meanwhile", next_step=f"invoke serve {tag} starts it")
        return self.wanted

    def note(self, changed: Callable[[Service], Service]) -> Service:
        return records.change(self.paths.home, self.recipe, changed)

    def look(self, part: Part) -> Served:
        with engine_errors():
            part.container.reload()
        return records.describe(self.engine, part.container)

    def bring_proxy(self, service: Service, drain: float = 0) -> Container:
        address, release = service.address or Address(), service.orders[0].release
        pem = read_tls(address.cert, address.tls_key) if address.cert else None
        key = key_of(self.paths, self.recipe, address)
        hold = proxies.hold_for(release, service.orders[0].checkpoint, self.drain)
        order = ProxyOrder(self.name, str(self.paths.home), self.recipe, release.tag, address, key, pem, hold)
        return proxies.bring(self.engine, order, drain)

    def create(self, service: Service) -> list[Part]:
        return linked.create(str(self.paths.home), self.machines, service.orders, volume=self.name)

    def end_old(self, proxy: Container) -> None:
        """The old server ends, if there is one, and before it the requests that it has: by themselves, or broken off,
        so that no stream of it says that it is complete, and none keeps vLLM from ending."""
        if any(is_running(part.container) for part in self.parts):
            title = self.parts[0].container.labels.get(records.RELEASE_LABEL)
            say(f"stopping {title}, which {self.wanted.orders[0].release.tag} replaces")
            if not wait_quiet(lambda: proxies.requests_under_way(proxy), self.drain):
                proxies.break_off(proxy)
        linked.stop(self.paths, self.recipe, self.parts)

    def await_ready(self, parts: Sequence[Part]) -> bool:
        """Until it answers a request from within, and one at its address. False where nobody waits for it."""
        order = self.wanted.orders[0]
        folder = crash_facts.folder_of(self.paths, self.recipe, order.release.name)
        try:  # from here on: who reads "started" may end the waiting at once
            if not self.same:
                say(f"started {self.name} from {order.release.tag}")
            if not (self.same and launch.asks(parts[0].container)):
                seconds = until_ready(parts, order.release, order.timeout, folder, fresh=not self.same)
                if order.gpus:
                    memory_limit.forget_files(order.checkpoint)
                say(f"ready after {seconds:.0f} s")
            if not (self.same and self.look(parts[0]).ready):
                answer(served := self.look(parts[0]), key_of(self.paths, self.recipe, served.address))
        except KeyboardInterrupt:
            return False
        return True

    def go_back(self) -> None:
        """All clients ask the old server again, also those that wait: the one that still runs, else another like it."""
        if not self.note(lambda record: self.known if record.orders else record).orders:
            return  # somebody has stopped it meanwhile
        there = linked.find_parts(str(self.paths.home), self.recipe, self.machines.values())
        is_left_alone = [part.container.id for part in there] == [part.container.id for part in self.parts]
        runs = bool(there) and (self.same or all(is_running(part.container) for part in there))
        if not (is_left_alone and runs and linked.is_of(there, self.known)):
            linked.remove(self.paths, self.recipe, there)
            if self.known.orders:
                say(f"starting {self.known.orders[0].release.tag} again")
                parts = self.create(self.known)
                linked.start(parts)
                linked.keep_up(parts, self.known.orders)
        if self.known.orders:
            self.bring_proxy(self.known)
        else:
            proxies.remove(self.engine, self.name)


def until_ready(parts: Sequence[Part], release: Release, timeout: float, folder: Path, *, fresh: bool) -> float:
    """Seconds that it took; kept beside `folder` for the next start of the recipe if this was one from its begin
    (fresh).

    NotReady with a post-mortem, kept in `folder`, as soon as the server ends, or when it does not answer within
    `timeout` seconds.
    """
    file = folder.with_name(LAST_START)
    with contextlib.suppress(OSError, ValueError):  # a hint and nothing more
        say(f"the last start took {float(file.read_text()):.0f} s")
    try:
        asks = partial(launch.asks, parts[0].container)
        seconds, _ = wait_for_answer(lambda: look(parts, release), asks, timeout, every=ASK_SECONDS)
    except StartFault as fault:
        raise failure(parts, release, str(fault), folder) from None
    if fresh:
        with files.atomic_file(file) as out:
            out.write(f"{seconds:.1f}\n".encode())
    return seconds


def look(parts: Sequence[Part], release: Release) -> tuple[str | None, bytes]:
    """Why it ended, None while it runs; and its log. SmokeError when somebody removed it."""
    with engine_errors():
        try:
            for part in parts:
                part.container.reload()
                how = running.how_ended(part.container)
                if not part.is_here and (how or running.stays_down(part.container)):
                    how = f"at {part.machine.where} {how or 'stays down'}"
                if how:
                    break
            return how, running.log_of(parts[0].container)
        except NotFound:
            raise SmokeError(
                f"{release.tag} was stopped while it started", next_step=f"invoke serve {release.tag}"
            ) from None


def failure(parts: Sequence[Part], release: Release, how: str, folder: Path) -> NotReady:
    """A report for each machine that answers; it is kept with the log. how: of rank 0."""
    found, log = [f"{release.tag} did not become ready"], b""
    for part in parts:
        with contextlib.nullcontext() if part.is_here else contextlib.suppress(SparkpinError), part.machine.errors():
            tag, ended = release.tag, how
            if not part.is_here:
                part.container.reload()
                tag, ended = f"{part.machine.where}: {tag}", running.how_ended(part.container) or "still ran"
            death = crash_facts.examine(part.container, release.recipe, tag, ended, here=part.is_here)
            crash_facts.write(part.folder(folder), death)
            found += report(death)
            log = log or death.log
    step = f"read {folder / crash_facts.LOG}; invoke smoke {release.tag}"
    return NotReady("\n".join(found), (log,), next_step=step)


def wait_quiet(load: Callable[[], int | None], seconds: float) -> bool:
    """Wait until no request is under way, at most `seconds`; whether that came. load: how many are; None where it is
    not known, which does not mean that there are none."""
    until, waits = time.monotonic() + seconds, False
    while (under_way := load()) != 0:
        if time.monotonic() >= until:
            what = "it is not known how many requests are" if under_way is None else count(under_way, "request")
            say(f"{what} under way after {seconds:.0f} s: broken off (--drain gives more time)")
            return False
        if not waits:
            say(f"waiting up to {seconds:.0f} s for requests under way to end ({under_way or '?'})")
            waits = True
        time.sleep(0.2)
    return True


def answer(served: Served, key: str | None) -> None:
    """SmokeError unless a real request gets its answer at the address that clients use."""
    until, pause = time.monotonic() + ANSWER_SECONDS, 0.1
    while (fault := fault_of(served, key)) and time.monotonic() < until:
        time.sleep(pause)  # the proxy starts, and Docker publishes a port a moment after it says so
        pause = min(2 * pause, 2.0)  # a proxy may allow one request a second
    if fault:
        raise SmokeError(
            f"{served.release} answers within its container, and not at {served.url}: {fault}",
            next_step=f"docker logs {served.container}{records.PROXY}; is there a firewall or a proxy between?",
        )


def fault_of(served: Served, key: str | None) -> str:
    """What is wrong with the answer to a real request; "" where nothing is."""
    from sparkpin.smoke.client import Fault  # slow to import

    with records.client_of(served, key, timeout=ANSWER_SECONDS) as client:
        try:
            reply = client.post(
                "/v1/completions", {"model": served.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
            )
        except Fault as fault:
            return str(fault)
    return "" if reply.status == 200 else f"{reply.status}: {reply.body.decode(errors='replace')[:200]}"
