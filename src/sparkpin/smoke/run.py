"""The smoke test: a release's own image serves its own checkpoint, and real requests show whether it may be used.

The evidence comes to lie in the folder `smoke` of the release's evidence: server.log (all that the container wrote;
server-1.log and so on for further nodes), exchanges.jsonl (each request with the raw answer), result.json and what
checks leave (`drift`: logprobs.json).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkpin.core import terminal
from sparkpin.core.files import write_json
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine
from sparkpin.host.fingerprint import Fingerprint, read_fingerprint
from sparkpin.pins.vllm_flags import served_name
from sparkpin.releases import container as running
from sparkpin.releases.current import how_it_failed
from sparkpin.releases.record import PRIVATE, Release
from sparkpin.smoke import drift, metrics, mods
from sparkpin.smoke.answers import speed_of
from sparkpin.smoke.checks import CheckResult, run_check
from sparkpin.smoke.client import Client
from sparkpin.smoke.demands import require_known
from sparkpin.smoke.evidence import Write, evidence_folder, record_of
from sparkpin.smoke.expectations import expectations_of
from sparkpin.smoke.replies import Exchange, Fault
from sparkpin.smoke.server import Place, Server, alone, started
from sparkpin.smoke.startup import NotReady, load_format, weights_seconds
from sparkpin.smoke.subject import SmokeSubject

QUIET_SECONDS = 10.0  # that a check may take before a line of progress
Serving = contextlib.AbstractContextManager[tuple[Server, Client]]
"""A server that answers, and a client of it; NotReady where it does not start."""


@dataclass(frozen=True)
class SmokeResult:
    passed: bool
    seconds: float  # of the whole test
    ready_seconds: float | None  # until the server answered, None where it never did
    checks: tuple[CheckResult, ...]  # the first is always "start"
    acceptance: float | None  # share of drafted tokens, None where nothing is drafted
    mods: tuple[str, ...]  # those that reported to be active
    load_format: str  # the loader
    weights_seconds: float | None  # what it took, None where the log does not say
    log_path: Path  # the container's complete log
    speed: dict[str, float] | None  # of its own requests


@dataclass
class ServerEvidence:
    """What a server leaves; filled in as it goes."""

    argv: Sequence[str] = ()
    checks: list[CheckResult] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    logs: tuple[bytes, ...] = (b"",)  # by rank
    acceptance: metrics.DraftCounts | None = None
    leaves: dict[str, Any] = field(default_factory=dict)  # file -> JSON value

    def add(self, name: str, passed: bool, detail: str, seconds: float, applicable: bool = True) -> None:
        result = CheckResult(name, passed, detail, round(seconds, 2), applicable)
        if applicable:  # what is not is printed together, at the end
            say(f"{name}: {result.verdict}, {detail}")
        self.checks.append(result)


@contextlib.contextmanager
def own_server(
    paths: Paths, release: Release, place: Place, places: Sequence[Place] = (), *, gpus: bool = False, limit: int = 120
) -> Iterator[tuple[Server, Client]]:
    """In a container without a network, gone in the end. place, places: as of `started`; limit: seconds of an answer.

    Raises:
        NotReady: it does not start.
        EngineError, IntegrityError: the engine refuses, or the tag is gone or names another image.
        CheckpointError: the container's user could not read the checkpoint.
    """
    checkpoint = Path(place.checkpoint)
    running.require_readable(checkpoint)
    running.require_image(place.engine, release)
    timeout = running.ready_timeout(checkpoint)
    with (
        started(paths, release, place, gpus=gpus, timeout=timeout, places=places) as server,
        Client.unix(server.socket, timeout=limit) as client,
    ):
        tag = release.tag
        server.wait_ready(client, how_it_failed(paths, release) if release.smoke_failed else f"invoke smoke {tag}")
        yield server, client


def run_smoke(
    paths: Paths, engine: Engine, release: Release, serving: Serving, others: Sequence[Engine] = ()
) -> tuple[SmokeResult, Write]:
    """Run the checks of the release's stage: by a server of their own, or by one that stays.

    The result and its evidence, for `smoke.evidence.kept`. Whatever the server does wrong is in them. One test of a
    home runs at a time. others: of other machines that it uses. ManifestError where the record names a check that does
    not exist.
    """
    require_known(release.demands.checks, f"the record of {release.tag}", "demands.checks")
    evidence, reference = ServerEvidence(), drift.reference(paths, release)
    with alone(paths, engine, others):
        begin = time.monotonic()
        try:
            with serving as (server, client):
                ready = time.monotonic() - begin
                evidence.add("start", True, f"ready after {ready:.1f} s", ready)
                examine(server, subject_of(release, client, server, reference=reference), evidence)
                server.stop()
                evidence.argv, evidence.logs = server.argv, server.logs()
        except NotReady as fault:
            evidence.logs = fault.logs
            evidence.add("start", False, fault.message, time.monotonic() - begin)
    return finished(paths, release, evidence, time.monotonic() - begin, read_fingerprint(engine.version))


def subject_of(release: Release, client: Client, server: Server, **known: Any) -> SmokeSubject:
    """known: further fields of a SmokeSubject."""
    model, expect = served_name(release.argv), expectations_of(release.demands)
    return SmokeSubject(client, model, expect, server.logs, release.demands, release.argv, **known)


def examine(server: Server, subject: SmokeSubject, evidence: ServerEvidence) -> None:
    """Run the checks until the last or until the server is gone."""
    evidence.exchanges, evidence.leaves = subject.client.exchanges, subject.leaves
    for name in subject.demands.checks:
        if reason := server.exit_reason():
            evidence.add(name, False, f"not asked: the container {reason}", 0.0)
            continue
        with waiting(f"{name} is being checked", QUIET_SECONDS):
            result = run_check(name, subject)
        last, detail = evidence.exchanges[-1:], result.detail
        if not result.passed and last and last[0].fault and (reason := server.exit_reason(wait=2)):
            detail = f"{detail}; the container {reason}"
        evidence.add(name, result.passed, detail, result.seconds, result.applicable)
    if skipped := skipped_line(evidence.checks):
        say(skipped)
    with contextlib.suppress(Fault):  # for the record, whether or not the stage has a floor for it
        counts = metrics.acceptance(subject.client.get("/metrics").body.decode(errors="replace"))
        evidence.acceptance = counts if counts and counts.drafted else None


def skipped_line(checks: Sequence[CheckResult]) -> str:
    """What could not be asked, by reason; "" for nothing."""
    reasons = dict[str, list[str]]()
    for check in checks:
        if not check.applicable:
            reasons.setdefault(check.detail, []).append(check.name)
    skipped = list[str]()
    for reason, names in reasons.items():
        which = terminal.count(len(names), "tool check") if all("tool" in name for name in names) else ", ".join(names)
        skipped.append(f"{which} skipped: {reason}")
    return "; ".join(skipped)


def finished(
    paths: Paths, release: Release, evidence: ServerEvidence, seconds: float, host: Fingerprint
) -> tuple[SmokeResult, Write]:
    """host: where the server ran."""
    counts, log, start = evidence.acceptance, evidence.logs[0], evidence.checks[0]
    result = SmokeResult(
        passed=all(check.passed for check in evidence.checks),
        seconds=round(seconds, 1),
        ready_seconds=start.seconds if start.passed else None,
        checks=tuple(evidence.checks),
        acceptance=round(counts.share, 4) if counts else None,
        mods=tuple(sorted(mods.active(mods.reports(log)))),
        load_format=load_format(release.argv),
        weights_seconds=weights_seconds(log),
        log_path=evidence_folder(paths, release) / "server.log",
        speed=speed_of(evidence.exchanges),
    )
    record = record_of(result, release, host) | {
        "argv": list(evidence.argv),
        "env": dict(release.env),
        "drafted_tokens": counts.drafted if counts else None,
        "accepted_tokens": counts.accepted if counts else None,
        "log_path": "server.log",
    }

    def write(folder: Path) -> None:
        for file, value in evidence.leaves.items():
            write_json(folder / file, value)
        for rank, log in enumerate(evidence.logs):
            (folder / (f"server-{rank}.log" if rank else "server.log")).write_bytes(log)
        lines = [json.dumps(exchange.as_dict(), ensure_ascii=False) + "\n" for exchange in evidence.exchanges]
        (folder / "exchanges.jsonl").write_text("".join(lines), encoding="utf-8")
        write_json(folder / "result.json", record, PRIVATE)  # its variables may hold a key

    return result, write
