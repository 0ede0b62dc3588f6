"""The task `logs`: a server's own words.

`--follow` follows the service and no container: it goes on when Docker starts that again, and when another release
takes its place."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from sparkpin.core import terminal
from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.serve import crash_facts, linked, nodes
from sparkpin.serve.nodes import HERE
from sparkpin.serve.served import LABEL, is_running
from sparkpin.serve.status import own_services, service_of

WATCH = re.compile(rb'INFO: +(?:- "POST /v1/completions|(?:client:0 )?- "GET /(?:health|metrics)) HTTP/1\.1" 200 OK')
"""What the server writes of who watches it, who asks from within and has no address, and of `invoke status`."""
GONE_SECONDS = 60.0  # until a server that was stopped counts as stopped for good: a switch starts the next one by then
LOOK_SECONDS = 0.5


def logs(paths: Paths, engine: Engine, recipe: str | None, *, lines: int, follow: bool) -> None:
    """The server's own words, of several machines with the name of each before its lines; where its container went with
    a start that failed, those that were kept."""
    runs = any(recipe in (None, one.labels[LABEL]) for one in own_services(paths, engine))
    if not runs and (kept := newest_log(paths, recipe)):
        terminal.say(f"nothing runs; of the last server that failed: {kept}")
        write(told_to_people(kept.read_bytes())[-lines:] if lines else [])
        return
    container = service_of(paths, engine, recipe)
    its, name = linked.nodes_of(container), container.labels[LABEL]
    with nodes.reached(its.urls if its else ()) as (machines, away), engine_errors():
        for url, error in away.items():
            terminal.say(f"{url} is away: {error.message}")
        if not follow:
            group = linked.group_of(container, machines)
            for where, part in [(HERE, container), *((machine.where, one) for machine, one in group)]:
                write(last_told(part, lines), f"{where} | " if its else "")
            return

        def here() -> Container | None:
            return next((one for one in own_services(paths, engine) if one.labels[LABEL] == name), None)

        for machine in machines:
            there = partial(linked.newest_at, paths, name, machine)
            threading.Thread(target=follow_log, args=(there, lines, f"{machine.where} | "), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):  # that is how one stops looking
            why = follow_log(here, lines, f"{HERE} | " if its else "")
            terminal.say(f"the log ends: {why}")


def follow_log(find: Callable[[], Container | None], lines: int, name: str) -> str:
    """Print a service's lines until it is down for good, or removed; returns which. find: its container as it is now;
    lines: how many of the first one's last lines to begin with."""
    seen, found, why = dict[str, str](), find(), "nothing runs"
    while found is not None:
        key, tail = str(found.id), "all" if seen else lines
        last = seen.setdefault(key, "")
        for moment, line in lines_of(found, tail, last):
            if moment > seen[key]:  # the last ones of before come again
                seen[key] = moment
                write(told_to_people(line), name)
        found, why = successor(find)
    return why


def lines_of(container: Container, tail: int | str, after: str) -> Iterator[tuple[str, bytes]]:
    """Lines as they come, each with its moment as Docker writes it, always with nine digits. The end of a container,
    and of Docker's answer, is the end. after: a moment; "" for the last `tail` lines."""
    since, rest = crash_facts.moment(after) if after else None, b""
    with contextlib.suppress(SparkpinError), engine_errors():
        for chunk in container.logs(stream=True, follow=True, timestamps=True, tail=tail, since=since):  # type: ignore[call-overload]
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield stamped(line + b"\n")
    if rest:
        yield stamped(rest)


def stamped(line: bytes) -> tuple[str, bytes]:
    moment, _, text = line.partition(b" ")
    return moment.decode(errors="replace"), text


def successor(find: Callable[[], Container | None]) -> tuple[Container | None, str]:
    """What goes on where a container's log has ended, the same or another; and why where nothing does."""
    until, why = time.monotonic() + GONE_SECONDS, "no Docker engine answers"
    while time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
        with contextlib.suppress(SparkpinError):
            now = find()
            if now is None:
                return None, "the server was removed"
            if is_running(now):
                return now, ""
            why = crash_facts.how_ended(now) or f"the server is {now.status}"
            if crash_facts.stays_down(now):
                break
    return None, why


def last_told(container: Container, count: int) -> list[bytes]:
    """The last lines that are meant for people: a day has 26,000 of who watches it."""
    asked = count
    while True:
        read = bytes(container.logs(tail=asked))
        told = told_to_people(read)
        if len(told) >= count or read.count(b"\n") < asked:
            return told[-count:] if count else []
        asked *= 10


def told_to_people(log: bytes) -> list[bytes]:
    return [line for line in log.splitlines(keepends=True) if not WATCH.match(line)]


def write(lines: Sequence[bytes], name: str = "") -> None:
    """Other people's bytes, without what a terminal would obey. name: goes before each line."""
    sys.stdout.write(terminal.tame("".join(name + line.decode(errors="replace") for line in lines)))
    sys.stdout.flush()


def newest_log(paths: Paths, recipe: str | None) -> Path | None:
    found = (paths.home / "serve").glob(f"{recipe or '*'}/*/{crash_facts.LOG}")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
