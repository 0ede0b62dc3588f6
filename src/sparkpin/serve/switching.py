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
from sparkpin.serve import crash_facts, launch, linked, memory_limit, proxy, waiting
from sparkpin.serve.launch import SOCKET_LABEL, LaunchOrder
from sparkpin.serve.memory_limit import Room
from sparkpin.serve.nodes import Checked
from sparkpin.serve.proxy import ProxyOrder
from sparkpin.serve.rules import SLOTS
from sparkpin.serve.served import FORMER, NEXT, PROXY, RELEASE_LABEL, Served, client_of, describe, find, is_running
from sparkpin.serve.waiting import Detached

STOP_SECONDS = 30
DRAIN_SECONDS = 30.0  # for requests under way
ANSWER_SECONDS = 60.0


@dataclass(frozen=True)
class Switch:
    """old: the recipe's server so far; together: there is room for both; checked: the machines of a release that is for
    several; room: its memory; drain: seconds that requests under way get."""

    paths: Paths
    engine: Engine
    order: ProxyOrder
    wanted: LaunchOrder
    old: Container | None
    checked: Checked | None
    room: Room | None
    together: bool
    drain: float

    def carry_out(self) -> Served:
        """Where there is room for one alone, new requests wait at the proxy from the moment that the old server gets no
        more. What does not become ready is removed, and the old one answers again, or still."""
        old, name = self.old, self.order.name
        slot = SLOTS[old is not None and slot_of(old) == SLOTS[0]]
        new = linked.create(self.engine, name + NEXT, self.wanted, self.checked, volume=name, folder=slot)
        try:
            with proxy.opened(self.engine, self.order, slot_of(old) if old else slot, self.drain) as front:
                if self.together and old is not None:
                    say(f"memory is enough for both: {title(old)} answers until {self.wanted.release.tag} does")
                else:
                    self.make_room(front, slot)
                    with engine_errors():
                        new.rename(name)
                        new.reload()
                self.start(new)
                proxy.use(front, slot)
                answer(new, front, self.order.key)
        except Detached:
            raise
        except BaseException:
            launch.remove(new)
            self.go_back(old)
            raise
        if self.together and old is not None:
            say(f"switched; stopping {title(old)}")
            with engine_errors():
                old.rename(name + FORMER)  # first: from now on the new one is the recipe's server
                new.rename(name)
            retire(front, old, self.drain)
        if old is not None:
            launch.remove(old)
        return look(new, front)

    def make_room(self, front: Container, slot: str) -> None:
        """The old server ends, if there is one."""
        proxy.use(front, slot)
        if self.old is not None:
            with engine_errors():
                if is_running(self.old):
                    say(f"stopping {title(self.old)}, which {self.wanted.release.tag} replaces")
                    retire(front, self.old, self.drain)
                self.old.rename(self.order.name + FORMER)
        if self.room:
            memory_limit.make_room(self.room, self.wanted.release, gpus=self.wanted.gpus)

    def start(self, new: Container) -> None:
        """It answers a request from within, and from now on Docker keeps it up. Detached when nobody waits for it."""
        release = self.wanted.release
        with engine_errors():
            new.start()
        say(f"started {new.name} from {release.tag}")
        folder = crash_facts.folder_of(self.paths, release.recipe, release.name)
        try:
            seconds = waiting.until_ready(new, release, self.wanted.timeout, folder, fresh=True)
        except KeyboardInterrupt:
            if self.together:
                raise
            linked.keep_up(new, self.wanted, self.checked)
            raise Detached(f"{new.name} goes on starting {release.tag}") from None
        if self.wanted.gpus and isinstance(self.wanted.checkpoint, Path):
            memory_limit.forget_files(self.wanted.checkpoint)
        linked.keep_up(new, self.wanted, self.checked)
        say(f"ready after {seconds:.0f} s")

    def resume(self, running: Container) -> Served:
        """The release runs already, or starts; its proxy may have to be another. old: the server before it, where a run
        that switched was broken off: that answers again if this one does not."""
        say(f"{self.wanted.release.tag} already runs as {running.name}")
        release = self.wanted.release
        try:
            with proxy.opened(self.engine, self.order, slot_of(running), self.drain) as front:
                if not launch.asks(running)[0]:
                    folder = crash_facts.folder_of(self.paths, release.recipe, release.name)
                    waiting.until_ready(running, release, self.wanted.timeout, folder, fresh=False)
                linked.keep_up(running, self.wanted, self.checked)  # a run that was broken off did not get to it
                proxy.use(front, slot_of(running))
                if not look(running, front).ready:
                    answer(running, front, self.order.key)
        except Exception:
            if self.old is not None:
                launch.remove(running)
                self.go_back(self.old)
            raise
        if self.old is not None:
            launch.remove(self.old)
        return look(running, front)

    def go_back(self, old: Container | None) -> None:
        """Clients ask the old server again; those that wait, too."""
        if old is None:
            proxy.drop_sockets(self.engine, self.order.name)
            return
        with engine_errors():
            old.reload()
            if old.name != self.order.name:
                old.rename(self.order.name)
            if front := find(self.engine, self.order.name + PROXY):
                proxy.use(front, slot_of(old))
            if is_running(old):
                say(f"{title(old)} still answers")
            else:
                say(f"starting {title(old)} again")
                old.start()


def slot_of(server: Container) -> str:
    return server.labels.get(SOCKET_LABEL, SLOTS[0])


def title(server: Container) -> str:
    return server.labels.get(RELEASE_LABEL, str(server.name))


def retire(front: Container, server: Container, drain: float) -> None:
    """It ends, and before it the requests that it has: by themselves, or broken off, so that no stream of it says that
    it is complete, and none keeps vLLM from ending."""
    slot = slot_of(server)
    if not waiting.wait_quiet(lambda: proxy.requests_under_way(front, slot), drain):
        proxy.break_off(front, slot)
    server.stop(timeout=STOP_SECONDS)


def look(server: Container, front: Container) -> Served:
    with engine_errors():
        server.reload()
        front.reload()
    return describe(server, front)


def answer(server: Container, front: Container, key: str | None) -> None:
    """SmokeError unless a real request gets its answer at the address that clients use."""
    served = look(server, front)
    until, pause = time.monotonic() + ANSWER_SECONDS, 0.1
    while (fault := fault_of(served, key)) and time.monotonic() < until:
        time.sleep(pause)  # the proxy starts, and Docker publishes a port a moment after it says so
        pause = min(2 * pause, 2.0)  # a proxy may allow one request a second
    if fault:
        raise SmokeError(
            f"{served.release} answers within its container, and not at {served.url}: {fault}",
            next_step=f"docker logs {front.name}; is there a firewall or a proxy between?",
        )
    say(f"answers at {served.url} (model {served.model})")


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
