"""From one server of a recipe to the next without a lost request, and back when the next fails."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.errors import SmokeError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases.inside import PROMPT
from sparkpin.serve import crash_facts, launch, linked, memory_limit, waiting
from sparkpin.serve import proxy as proxies
from sparkpin.serve.cluster import Checked
from sparkpin.serve.launch import LaunchOrder
from sparkpin.serve.memory_limit import Room
from sparkpin.serve.proxy import ProxyOrder
from sparkpin.serve.served import FORMER, RELEASE_LABEL, Served, client_of, describe, is_running, keep_address
from sparkpin.serve.waiting import Detached

STOP_SECONDS = 30
DRAIN_SECONDS = 30.0  # for requests under way
ANSWER_SECONDS = 60.0


@dataclass(frozen=True)
class Switch:
    """running: the wanted server, where there is one already; old: the one before it, which answers again if the wanted
    one does not; checked: the machines of a release that is for several; room: its memory; drain: seconds that requests
    under way get."""

    paths: Paths
    engine: Engine
    order: ProxyOrder
    wanted: LaunchOrder
    running: Container | None
    old: Container | None
    checked: Checked | None
    room: Room | None
    drain: float

    def carry_out(self) -> Served:
        """New requests wait at the proxy until the new server answers. What does not become ready is removed, and the
        old one answers again.

        Detached where nobody waits until it is ready."""
        new, release = self.running, self.wanted.release
        try:
            with proxies.opened(self.engine, self.order, self.drain) as proxy:
                if new is None:
                    with proxies.shut(proxy):
                        self.end_old(proxy)
                        new = linked.create(
                            self.engine, self.order.name, self.wanted, self.checked, volume=self.order.name
                        )
                    if self.room:
                        memory_limit.make_room(self.room, release, gpus=self.wanted.gpus)
                    with engine_errors():
                        new.start()
                    say(f"started {new.name} from {release.tag}")
                else:
                    say(f"{release.tag} already runs as {new.name}")
                ready = self.await_ready(new)
                linked.keep_up(new, self.wanted, self.checked)
                if ready and (self.running is None or not look(new, proxy).ready):
                    answer(new, proxy, self.order.key)
        except BaseException:
            if self.running is None or self.old is not None:
                if new is not None:
                    launch.remove(new)
                self.go_back()
            raise
        keep_address(self.paths, release.recipe, self.order.address)  # for when no proxy is left that has it
        if not ready:
            raise Detached(f"{new.name} goes on starting {release.tag}")
        if self.old is not None:
            launch.remove(self.old)
        return look(new, proxy)

    def end_old(self, proxy: Container) -> None:
        """The old server ends, if there is one, and before it the requests that it has: by themselves, or broken off,
        so that no stream of it says that it is complete, and none keeps vLLM from ending."""
        if self.old is not None:
            if is_running(self.old):
                say(f"stopping {title(self.old)}, which {self.wanted.release.tag} replaces")
                if not waiting.wait_quiet(lambda: proxies.requests_under_way(proxy), self.drain):
                    proxies.break_off(proxy)
                try:
                    with engine_errors():
                        self.old.stop(timeout=STOP_SECONDS)
                except BaseException:
                    launch.end(self.old)  # it was asked to end: `go_back` must not take it for one that runs
                    raise
            launch.rename(self.old, self.order.name + FORMER)

    def await_ready(self, server: Container) -> bool:
        """Until it answers a request from within. False where nobody waits for it."""
        release, fresh = self.wanted.release, self.running is None
        folder = crash_facts.folder_of(self.paths, release.recipe, release.name)
        try:
            if not fresh and launch.asks(server):
                return True
            seconds = waiting.until_ready(server, release, self.wanted.timeout, folder, fresh=fresh)
        except KeyboardInterrupt:
            return False
        if self.wanted.gpus and isinstance(self.wanted.checkpoint, Path):
            memory_limit.forget_files(self.wanted.checkpoint)
        say(f"ready after {seconds:.0f} s")
        return True

    def go_back(self) -> None:
        """Clients ask the old server again; those that wait, too."""
        if self.old is None:
            proxies.drop_sockets(self.engine, self.order.name)
            return
        with engine_errors():
            self.old.reload()
            if self.old.name != self.order.name:
                launch.rename(self.old, self.order.name)
            if not is_running(self.old):
                say(f"starting {title(self.old)} again")
                launch.clear_word(self.old)
                self.old.start()


def title(server: Container) -> str:
    return server.labels.get(RELEASE_LABEL, str(server.name))


def look(server: Container, proxy: Container) -> Served:
    with engine_errors():
        server.reload()
        proxy.reload()
    return describe(server, proxy)


def answer(server: Container, proxy: Container, key: str | None) -> None:
    """SmokeError unless a real request gets its answer at the address that clients use."""
    served = look(server, proxy)
    until, pause = time.monotonic() + ANSWER_SECONDS, 0.1
    while (fault := fault_of(served, key)) and time.monotonic() < until:
        time.sleep(pause)  # the proxy starts, and Docker publishes a port a moment after it says so
        pause = min(2 * pause, 2.0)  # a proxy may allow one request a second
    if fault:
        raise SmokeError(
            f"{served.release} answers within its container, and not at {served.url}: {fault}",
            next_step=f"docker logs {proxy.name}; is there a firewall or a proxy between?",
        )


def fault_of(served: Served, key: str | None) -> str:
    """What is wrong with the answer to a real request; "" where nothing is."""
    from sparkpin.smoke.replies import Fault  # slow to import

    with client_of(served, key, timeout=ANSWER_SECONDS) as client:
        try:
            reply = client.post(
                "/v1/completions", {"model": served.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
            )
        except Fault as fault:
            return str(fault)
    return "" if reply.status == 200 else f"{reply.status}: {reply.body.decode(errors='replace')[:200]}"
