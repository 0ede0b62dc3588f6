"""From one server of a recipe to the next without a lost request, and back when the next fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparkpin.core.errors import SmokeError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases.inside import PROMPT
from sparkpin.serve import crash_facts, keys, launch, linked, memory_limit, waiting
from sparkpin.serve import proxy as proxies
from sparkpin.serve import served as records
from sparkpin.serve.address import read_tls
from sparkpin.serve.cluster import Machine
from sparkpin.serve.linked import Part
from sparkpin.serve.memory_limit import Room
from sparkpin.serve.proxy import ProxyOrder
from sparkpin.serve.served import Served, Service, is_running
from sparkpin.serve.waiting import Detached

DRAIN_SECONDS = 30.0  # for requests under way
ANSWER_SECONDS = 60.0


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
            self.note(lambda _: self.wanted)
            proxy = self.bring_proxy(self.wanted, self.drain)
            if self.same:
                say(f"{order.release.tag} already runs as {self.name}")
            else:
                with proxies.shut(proxy):
                    self.end_old(proxy)
                    parts = self.create(self.wanted)
                if self.room:
                    memory_limit.make_room(self.room, order.release, gpus=order.gpus)
                linked.start(parts)
                say(f"started {self.name} from {order.release.tag}")
            ready = self.await_ready(parts)
            linked.keep_up(parts, self.wanted.orders)
        except BaseException:
            try:
                self.go_back()
            except SparkpinError as error:  # why the new one failed is what matters
                say(f"warning: nothing answers: {error.message}")
            raise
        if not ready:
            raise Detached(f"{self.name} goes on starting {order.release.tag}")
        self.note(lambda record: record.model_copy(update={"former": None}))
        return self.look(parts[0])

    def note(self, changed: Callable[[Service], Service]) -> Service:
        return records.change(self.paths.home, self.recipe, changed)

    def look(self, part: Part) -> Served:
        with engine_errors():
            part.container.reload()
        return records.describe(self.engine, part.container)

    def key_of(self, service: Service) -> str | None:
        assert service.address
        return keys.key_of(self.paths, service.orders[0].release, service.address.host)

    def bring_proxy(self, service: Service, drain: float = 0) -> Container:
        address, release = service.address, service.orders[0].release
        assert address
        pem = read_tls(address.cert, address.tls_key) if address.cert else None
        key = self.key_of(service)
        order = ProxyOrder(self.name, str(self.paths.home), self.recipe, release.tag, address, key, pem)
        return proxies.bring(self.engine, order, drain)

    def create(self, service: Service) -> list[Part]:
        return linked.create(str(self.paths.home), self.machines, service.orders, volume=self.name)

    def end_old(self, proxy: Container) -> None:
        """The old server ends, if there is one, and before it the requests that it has: by themselves, or broken off,
        so that no stream of it says that it is complete, and none keeps vLLM from ending."""
        if any(is_running(part.container) for part in self.parts):
            title = self.parts[0].container.labels.get(records.RELEASE_LABEL)
            say(f"stopping {title}, which {self.wanted.orders[0].release.tag} replaces")
            if not waiting.wait_quiet(lambda: proxies.requests_under_way(proxy), self.drain):
                proxies.break_off(proxy)
        linked.stop(self.paths, self.recipe, self.parts)

    def await_ready(self, parts: Sequence[Part]) -> bool:
        """Until it answers a request from within, and one at its address. False where nobody waits for it."""
        order = self.wanted.orders[0]
        folder = crash_facts.folder_of(self.paths, self.recipe, order.release.name)
        try:
            if not (self.same and launch.asks(parts[0].container)):
                seconds = waiting.until_ready(parts, order.release, order.timeout, folder, fresh=not self.same)
                if order.gpus:
                    memory_limit.forget_files(order.checkpoint)
                say(f"ready after {seconds:.0f} s")
            if not (self.same and self.look(parts[0]).ready):
                answer(self.look(parts[0]), self.key_of(self.wanted))
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
    from sparkpin.smoke.replies import Fault  # slow to import

    with records.client_of(served, key, timeout=ANSWER_SECONDS) as client:
        try:
            reply = client.post(
                "/v1/completions", {"model": served.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
            )
        except Fault as fault:
            return str(fault)
    return "" if reply.status == 200 else f"{reply.status}: {reply.body.decode(errors='replace')[:200]}"
