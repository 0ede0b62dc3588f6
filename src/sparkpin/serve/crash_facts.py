"""Gather what a post-mortem needs from the engine and the machine, and keep it."""

from __future__ import annotations

import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from sparkpin.core.files import atomic_file
from sparkpin.core.paths import Paths
from sparkpin.host import machine
from sparkpin.host.containers import Container, NotFound
from sparkpin.host.engine import engine_errors
from sparkpin.host.machine import Gpu, read_gpus
from sparkpin.releases import container as running
from sparkpin.serve.postmortem import Death, memory_line, report

REPORT, LOG = "post-mortem.txt", "server.log"
LOG_BYTES = 4 << 20
KERNEL = re.compile(r"^\[\s*(\d+\.\d+)\]\s*(.*(?:NVRM: Xid|Memory cgroup out of memory|Out of memory: Killed).*)$")
KERNEL_LINES = 3


def folder_of(paths: Paths, recipe: str, release: str) -> Path:
    """Where a home keeps what its servers leave. release: the name, without the recipe."""
    return paths.home / "serve" / recipe / release


def how_ended(container: Container) -> str | None:
    """Why a container does not run; None while it does, or while Docker starts it again."""
    state = container.attrs["State"]
    if state["Status"] in ("created", "running", "restarting", "paused"):
        return None
    return running.end_of(state) if state["ExitCode"] else "was stopped, or failed too often and stays down"


def last_check(state: dict[str, Any]) -> str:
    """What Docker's last health check printed; "" where there was none."""
    log = (state.get("Health") or {}).get("Log") or []
    return str(log[-1].get("Output", "")).strip().partition("\n")[0] if log else ""


def examine(container: Container, recipe: str, tag: str, how: str) -> Death:
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
        machine=machine_lines(attrs["HostConfig"].get("Memory") or None, attrs["State"].get("StartedAt", "")),
        log=log,
    )


def machine_lines(limit: int | None, started: str) -> list[str]:
    """Memory, GPUs, and what the kernel has said of either since the server's start."""
    host = machine.read_host()
    found = [memory_line(host.memory_total, host.memory_available, limit)]
    found += [gpu_line(gpu) for gpu in read_gpus()]
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)  # dmesg counts from then
    return found + kernel_lines(machine.output(("dmesg",)) or "", started, boot)


def kernel_lines(text: str, started: str, boot: float) -> list[str]:
    """started: as Docker writes a moment; boot: seconds since 1970. The last lines, of those after `started`."""
    try:
        since = datetime.fromisoformat(re.sub(r"\.\d+", "", started).replace("Z", "+00:00")).timestamp() - boot
    except ValueError:
        return []
    seen = [found for line in text.splitlines() if (found := KERNEL.match(line))]
    return [f"kernel: {found[2]}" for found in seen if float(found[1]) >= since - 1][-KERNEL_LINES:]


def gpu_line(gpu: Gpu) -> str:
    busy = f", {gpu.utilization:.0f} % busy" if gpu.utilization is not None else ""
    slowed = f", slowed by {' and '.join(gpu.slowed)}" if gpu.slowed else ""
    return f"GPU now: {gpu.name}, driver {gpu.driver}{busy}{slowed}"


def keep(folder: Path, death: Death) -> Path:
    """Write report and log, since the container may go. Where the report lies."""
    with atomic_file(folder / LOG, mode=0o600) as file:
        file.write(death.log[-LOG_BYTES:])
    with atomic_file(folder / REPORT, mode=0o600) as file:
        file.write(("\n".join(report(death)) + "\n").encode())
    return folder / REPORT
