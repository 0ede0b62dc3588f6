"""Gather what a post-mortem needs from the engine and the machine, and keep it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from sparkpin.core.errors import DiskError
from sparkpin.core.files import atomic_file
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, size
from sparkpin.host import machine
from sparkpin.host.containers import Container, NotFound
from sparkpin.host.engine import engine_errors
from sparkpin.host.machine import Gpu, read_gpus
from sparkpin.releases import container as running
from sparkpin.releases.postmortem import ENDED, Death, report, until_death

REPORT, LOG = "post-mortem.txt", "server.log"
LOG_BYTES = 4 << 20
KERNEL = re.compile(
    r"^\[\s*(\d+\.\d+)\]\s*(?:\S+ kernel: )?"
    r"(.*(?:NVRM: .*(?:Xid|NV_ERR_|fallen off|[Ff]ailed|Out of memory)|Out of memory: Killed|oom-kill).*)$"
)
KERNEL_LOGS = (("dmesg",), ("journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager"))
"""The second is for a user whom `kernel.dmesg_restrict` keeps from the first."""
KERNEL_LINES = 3


def folder_of(paths: Paths, recipe: str, release: str) -> Path:
    """Where a home keeps what its servers leave. release: the name, without the recipe."""
    return paths.home / "serve" / recipe / release


def last_check(state: dict[str, Any]) -> str:
    """What Docker's last health check printed; "" where there was none."""
    log = (state.get("Health") or {}).get("Log") or []
    return str(log[-1].get("Output", "")).strip().partition("\n")[0] if log else ""


def examine(container: Container, recipe: str, tag: str, how: str, *, here: bool = True) -> Death:
    """here: the container is on this machine, so its state is asked as well."""
    with engine_errors():
        attrs = container.attrs
        try:
            log = running.log_of(container)
        except NotFound:  # somebody has removed it meanwhile
            log = b""
    return Death(
        tag=tag,
        recipe=recipe,
        how=how,
        restarts=int(attrs.get("RestartCount", 0)),
        health=last_check(attrs["State"]),
        machine=machine_lines(attrs) if here else (),
        log=log,
    )


def machine_lines(attrs: Mapping[str, Any]) -> list[str]:
    """Memory, GPUs, and what the kernel has logged of either since a container was made."""
    host, limit = machine.read_host(), attrs["HostConfig"].get("Memory")
    limited = f", the server's limit is {size(limit)}" if limit else ""
    found = [f"memory now: {size(host.memory_available)} of {size(host.memory_total)} available{limited}"]
    found += [gpu_line(gpu) for gpu in read_gpus()]
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)  # the kernel counts from then
    texts = (machine.output(argv) or "" for argv in KERNEL_LOGS)
    text = next((text for text in texts if re.search(r"^\[", text, re.MULTILINE)), None)  # else "-- No entries --"
    if text is None:
        return [*found, "kernel: this user may not read its messages: sudo dmesg | grep -E 'NVRM|Xid|memory'"]
    return found + kernel_lines(text, attrs.get("Created", ""), boot, attrs.get("Id", ""))


def kernel_lines(text: str, since: str, boot: float, container: str) -> list[str]:
    """since: as Docker writes a moment; boot: seconds since 1970; container: its ID, for the limits of others say
    nothing. The last lines after that moment that differ: they come in bursts."""
    begin = moment(since) - boot - 1
    every = [found for line in text.splitlines() if (found := KERNEL.match(line)) and float(found[1]) >= begin]
    lines = dict.fromkeys(
        f"kernel: {one[2]}" for one in every if "CONSTRAINT_MEMCG" not in one[2] or container in one[2]
    )
    return list(lines)[-KERNEL_LINES:]


def moment(text: str) -> float:
    """Whole seconds since 1970 of a moment as Docker writes it; the end of time for none."""
    try:
        return datetime.fromisoformat(re.sub(r"\.\d+", "", text)).timestamp()
    except ValueError:
        return math.inf


def gpu_line(gpu: Gpu) -> str:
    busy = f", {gpu.utilization:.0f} % busy" if gpu.utilization is not None else ""
    slowed = f", slowed by {' and '.join(gpu.slowed)}" if gpu.slowed else ""
    return f"GPU now: {gpu.name}, driver {gpu.driver}{busy}{slowed}"


def write(folder: Path, death: Death) -> None:
    """Report and log, since the container may go."""
    with atomic_file(folder / LOG, mode=0o600) as file:
        file.write(death.log[-LOG_BYTES:])
    with atomic_file(folder / REPORT, mode=0o600) as file:
        file.write(("\n".join(report(death)) + "\n").encode())


def in_short(path: Path) -> str:
    """One line of a post-mortem: who died, of what, and where the rest is."""
    return "; ".join([*path.read_text(encoding="utf-8").splitlines()[:2], f"post-mortem: {path}"])


def keep_evidence(container: Container, folder: Path, recipe: str, tag: str, *, here: bool = True) -> str:
    """Keep what a server that died in service has left, before its container goes. Its last death as of `in_short`; ""
    where it never died, or never was in service, whose post-mortem `serve` wrote. here: as of `examine`."""
    attrs, how, path = container.attrs, running.how_ended(container), folder / REPORT
    restarts, ended = attrs.get("RestartCount"), moment(attrs["State"].get("FinishedAt", ""))
    if not (how or restarts) or attrs["HostConfig"]["RestartPolicy"]["Name"] in ("", "no"):
        return ""
    if not path.is_file() or path.stat().st_mtime < ended:
        death = examine(container, recipe, tag, how or "died", here=here)
        if ENDED not in death.log and not restarts:  # it was stopped, and by force in the end
            return ""
        try:
            write(folder, replace(death, log=until_death(death.log)))
        except DiskError as error:  # a full disk must not keep anybody from stopping a server
            say(f"warning: the post-mortem of {tag} is lost: {error.message}")
            return ""
    return in_short(path)
