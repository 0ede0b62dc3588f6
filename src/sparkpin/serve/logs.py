"""The task `logs`: a server's own words.

`--follow` follows the service and no container: it goes on when Docker starts that again, and when another release
takes its place."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from sparkpin.core import terminal
from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases import container as running
from sparkpin.releases.postmortem import WATCH
from sparkpin.serve import cluster, crash_facts, linked
from sparkpin.serve.cluster import HERE, Machine
from sparkpin.serve.served import LABEL, RELEASE_LABEL, is_running, read, services
from sparkpin.serve.status import service_of

GONE_SECONDS = 60.0  # until a server that was stopped counts as stopped for good: a switch starts the next one by then
LOOK_SECONDS = 0.5
GONE_LOOKS = 10  # that find no container: in a switch there is none for a moment


def logs(paths: Paths, engine: Engine, recipe: str | None, *, lines: int, follow: bool) -> None:
    """The server's own words, of several machines with the name of each before its lines; where its container went with
    a start that failed, those that were kept. Then the last death in short, where there was one. lines: how many of the
    last ones."""
    runs = any(recipe in (None, one.labels[LABEL]) for one in services(engine, paths.home))
    reports = (paths.home / "serve").glob(f"{recipe or '*'}/*/{crash_facts.REPORT}")
    if not runs and (newest := max(reports, key=lambda path: path.stat().st_mtime, default=None)):
        write(deque(without_watch(io.BytesIO(newest.with_name(crash_facts.LOG).read_bytes())), lines))
        terminal.say(f"nothing runs; of the last server that failed: {crash_facts.in_short(newest)}")
        return
    container = service_of(paths, engine, recipe)
    recipe = container.labels[LABEL]
    urls, home = read(paths.home, recipe).others, str(paths.home)
    with cluster.reached(urls) as (machines, away), engine_errors():
        for url, error in away.items():
            terminal.say(f"{url} is away: {error.message}")
        moments, every = dict[str, str](), [Machine(HERE, engine), *machines]
        parts = linked.find_parts(home, recipe, every)
        for part in parts:
            lines_read, moments[str(part.container.id)] = last_lines(part.container, lines)
            write(lines_read, f"{part.machine.where} | " if urls else "")
        if not follow:
            tag = container.labels[RELEASE_LABEL]
            for death in filter(None, [linked.last_death(paths, recipe, tag, part) for part in parts]):
                terminal.say(death)
            return

        def find(machine: Machine) -> Container | None:
            return next((part.container for part in linked.find_parts(home, recipe, [machine])), None)

        for machine in machines:
            there = partial(find, machine)
            threading.Thread(target=follow_log, args=(there, moments, f"{machine.where} | "), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):  # that is how one stops looking
            why = follow_log(partial(find, every[0]), moments, f"{HERE} | " if urls else "")
            terminal.say(f"the log ends: {why}")


def last_lines(container: Container, count: int) -> tuple[list[bytes], str]:
    """The last lines that are meant for people, and the moment of the last that was read: a day has 35,000 of who
    watches it."""
    asked = max(count, 1)
    while True:
        read = [stamped(line) for line in io.BytesIO(container.logs(tail=asked, timestamps=True))]
        found = without_watch(text for _, text in read)
        if len(found) >= count or len(read) < asked:
            return list(deque(found, count)), read[-1][0] if read else ""
        asked *= 10


def follow_log(find: Callable[[], Container | None], moments: dict[str, str], name: str) -> str:
    """Print a service's lines until it is down for good, or removed; returns which. find: its container as it is now;
    moments: until when each container has been read."""
    found, why = find(), "nothing runs"
    while found is not None:
        key = str(found.id)
        for moment, line in lines_of(found, moments.setdefault(key, "")):
            if moment > moments[key]:  # the last ones of before come again
                moments[key] = moment
                write(without_watch([line]), name)
        found, why = successor(find)
    return why


def lines_of(container: Container, after: str) -> Iterator[tuple[str, bytes]]:
    """Lines as they come, each with its moment as Docker writes it, always with nine digits. The end of a container,
    and of Docker's answer, is the end. after: a moment; "" for all lines."""
    since, rest = crash_facts.moment(after) if after else None, b""
    with contextlib.suppress(SparkpinError), engine_errors():
        for chunk in container.logs(stream=True, follow=True, timestamps=True, since=since):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield stamped(line + b"\n")
    if rest:
        yield stamped(rest)


def stamped(line: bytes) -> tuple[str, bytes]:
    moment, _, text = line.partition(b" ")
    return moment.decode(errors="replace"), text


def successor(find: Callable[[], Container | None]) -> tuple[Container | None, str]:
    """What goes on where a container's log has ended, the same or another; and why where nothing does."""
    until, why, gone = time.monotonic() + GONE_SECONDS, "no Docker engine answers", 0
    while time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
        with contextlib.suppress(SparkpinError):
            now = find()
            if now is None:
                gone += 1
                if gone > GONE_LOOKS:
                    return None, "the server was removed"
                continue
            if is_running(now):
                return now, ""
            why = running.how_ended(now) or f"the server is {now.status}"
            if running.stays_down(now):
                break
    return None, why


def without_watch(lines: Iterable[bytes]) -> list[bytes]:
    return [line for line in lines if not WATCH.match(line.decode(errors="replace"))]


def write(lines: Iterable[bytes], name: str = "") -> None:
    """Other people's bytes, without what a terminal would obey. name: goes before each line."""
    sys.stdout.write(terminal.tame("".join(name + line.decode(errors="replace") for line in lines)))
    sys.stdout.flush()
