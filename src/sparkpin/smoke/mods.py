"""What the mods in an image say about themselves: in the server's log (mods/modkit writes the lines), and where their
GPU kernels are compared with what they should compute (`sparkpin_modkit.selfcheck` in the image; no server runs)."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkpin.core.errors import HostError, InspectionError, UntoldError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases import container as running
from sparkpin.releases.record import Release
from sparkpin.releases.runs_here import obstacle
from sparkpin.smoke.server import container_of, exclusive_run

MARKER = b"SPARKPIN_MOD "
OF_THE_API = frozenset({"guard"})  # at work where requests are answered: of several nodes that is the first
AGREED = "agreed"  # an event of modkit's: each rank of several has said the same of release, mods and switches
LIMIT_SECONDS = 600.0
NO_KERNELS = 69  # of sparkpin_modkit.selfcheck: no GPU, or no mod that has anything to compare
OF_KERNELS = ("kernels", "compiled", "checked")  # events that `kernel_faults` judges, but for the last


@dataclass(frozen=True)
class ModReport:
    mod: str
    event: str
    value: Mapping[str, Any] = field(default_factory=dict)  # the whole line


def reports(log: bytes) -> tuple[ModReport, ...]:
    """Every report in a log, in order. A line that is marked but not readable is a report of failure."""
    found = []
    for line in log.splitlines():
        _, marker, rest = line.partition(MARKER)
        if marker:
            text = rest.decode(errors="replace")
            try:
                value, _ = json.JSONDecoder().raw_decode(text)
                found.append(ModReport(value["mod"], value["event"], value))
            except (ValueError, KeyError, TypeError):
                found.append(ModReport("?", "failed", {"error": f"unreadable line: {text[:120]}"}))
    return tuple(found)


def active(reports: Iterable[ModReport]) -> frozenset[str]:
    return frozenset(one.mod for one in reports if one.event == "active")


def not_needed(reports: Iterable[ModReport]) -> dict[str, str]:
    """Mod -> why it has nothing to do: int8-lm-head, where the checkpoint has quantised its LM head itself."""
    rows = [(one.mod, one.value["head"]) for one in reports if one.event == "off" and "head" in one.value]
    return {mod: f"off, the LM head is {head}'s" for mod, head in rows}


def faults(reports: Sequence[ModReport], wanted: Collection[str]) -> list[str]:
    """What is wrong: failed, missing or switched off, or active though the stage does not have it."""
    works = active(reports)
    events = {one.mod: one.event for one in reports if one.event not in ("active", *OF_KERNELS)}
    found = [f"mod {one.mod} failed: {one.value.get('error', '')}" for one in reports if one.event == "failed"]
    for mod in sorted(set(wanted) - works - not_needed(reports).keys()):
        if events.get(mod) != "failed":
            found.append(f"mod {mod} is not active ({events.get(mod, 'no line in the log')})")
    found += [f"mod {mod} is active, but this stage does not have it" for mod in sorted(works - set(wanted))]
    return list(dict.fromkeys(found))


def kernel_summaries(reports: Iterable[ModReport]) -> dict[str, str]:
    """Mod -> "8 of 8 kernels from the image", as the last process said it."""
    rows = [(one.mod, one.value) for one in reports if one.event == "kernels"]
    return {mod: f"{row.get('image')} of {row.get('total')} kernels from the image" for mod, row in rows}


def kernel_faults(reports: Sequence[ModReport], wanted: Iterable[str]) -> list[str]:
    """What is wrong: a mod that says nothing, or has a kernel that was not compiled when the image was built."""
    found = []
    for one in reports:
        total, compiled = one.value.get("total"), one.value.get("compiled") or ()
        if one.event == "kernels" and (not total or one.value.get("image") != total):
            names = ", ".join(dict.fromkeys(map(str, compiled))) or "none"
            found.append(f"mod {one.mod}: {kernel_summaries([one])[one.mod]}; compiled now: {names}")
        elif one.event == "compiled":
            found.append(f"mod {one.mod}: kernel {one.value.get('kernel')} was compiled after the start")
    silent = sorted(set(wanted) - kernel_summaries(reports).keys() - not_needed(reports).keys())
    return [*dict.fromkeys(found), *(f"mod {mod} does not say where its kernels came from" for mod in silent)]


def compare_kernels(paths: Paths, engine: Engine, release: Release, *, limit: float = LIMIT_SECONDS) -> str:
    """The table of `sparkpin_modkit.selfcheck`, run in the release's image on the GPU, with the image's digest above.

    Args:
        limit: seconds.

    Raises:
        UntoldError: its mods have no GPU kernels, or its stack has no GPU.
        HostError: no server of it can run here, or the container has no GPU.
        InspectionError: a kernel computes something else, or the table did not come to its end; has what came.
    """
    if not release.demands.kernels:
        mods = ", ".join(release.demands.mods) or "none"
        raise UntoldError(
            f"{release.tag} has no GPU kernels to compare: stack {release.stack}, mods {mods}",
            next_step="invoke smoke --kernels TAG, of stage v2 or above and of a stack with a GPU (invoke images)",
        )
    running.require_here(engine)
    if why := obstacle(paths, engine, release, nodes=1):
        raise HostError(f"the kernels of {release.tag} cannot run here: {why}", next_step="invoke doctor")
    running.require_image(engine, release)
    with exclusive_run(paths, engine):
        say(f"{release.tag}: comparing the kernels of {', '.join(release.demands.kernels)}")
        settings: dict[str, Any] = running.apart(running.sandbox(release.env, memory=None)) | running.all_gpus()
        volumes = {running.cache_volume(engine, release): {"bind": running.HOME, "mode": "rw"}}
        settings |= {"entrypoint": ["python"], "command": ["-m", "sparkpin_modkit.selfcheck"]}
        with container_of(paths, engine, release, "kernels", volumes=volumes, **settings) as container, engine_errors():
            until = time.monotonic() + limit
            while not (ended := running.exit_reason(container)) and time.monotonic() < until:
                time.sleep(0.2)
            log, code = running.log_of(container), container.attrs["State"]["ExitCode"]
    came = [line for line in log.decode(errors="replace").splitlines() if MARKER.decode() not in line]
    table = "\n".join([f"{'image':15}{release.tag}, {release.image}", *came])
    if ended and code == NO_KERNELS:
        raise HostError(f"{release.tag}: {came[-1] if came else 'no GPU'}", next_step="invoke doctor --fix")
    if not ended or code:
        what = "gives other results than its specification" if " FAILED" in table else "did not end"
        raise InspectionError(
            f"{release.tag}: a kernel {what} ({ended or f'stopped after {limit:.0f} s'})\n{table}",
            next_step="send this table with the report of a bug; until then serve the stage below: invoke rollback",
        )
    return table
