"""The smoke test: a release's own image serves its own checkpoint, and real requests show whether it may be used.

The evidence comes to lie in the folder `smoke` of the release's evidence: server.log (all that the container wrote;
server-1.log and so on for further nodes), exchanges.jsonl (each request with the raw answer), result.json and what
checks leave (`drift`: logprobs.json). Servers that draft another number of tokens leave server-drafts-N.log and
exchanges-drafts-N.jsonl; their checks are `name@N`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparkpin.core import terminal
from sparkpin.core.files import write_json
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import say
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine
from sparkpin.host.fingerprint import Fingerprint, read_fingerprint
from sparkpin.pins.vllm_flags import served_name
from sparkpin.releases import container as running
from sparkpin.releases.record import Release
from sparkpin.smoke import drafting, drift, metrics, mods
from sparkpin.smoke.answers import RequestSpeed, speed_of
from sparkpin.smoke.checks import CheckResult, run_check
from sparkpin.smoke.client import Client
from sparkpin.smoke.demands import require_known
from sparkpin.smoke.evidence import Write, evidence_folder, record_of
from sparkpin.smoke.expectations import expectations_of
from sparkpin.smoke.replies import Exchange, Fault
from sparkpin.smoke.server import Place, Server, alone, socket_argv, started
from sparkpin.smoke.startup import NotReady, StartFault, load_format, weights_seconds
from sparkpin.smoke.subject import SmokeSubject

QUIET_SECONDS = 10.0  # that a check may take before a line of progress
Serving = contextlib.AbstractContextManager[tuple[Container, Client]]
"""Starts a server that goes on (NotReady where that fails), and gives it with a client of its address."""


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
    speed: RequestSpeed | None  # of its own requests


@dataclass
class ServerEvidence:
    """What one server leaves; filled in as it goes."""

    argv: Sequence[str]
    mark: str = ""  # behind its checks' names
    checks: list[CheckResult] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    log: bytes = b""
    other_logs: tuple[bytes, ...] = ()  # of ranks 1 and up
    ready_seconds: float | None = None
    acceptance: metrics.DraftCounts | None = None
    leaves: dict[str, Any] = field(default_factory=dict)  # file -> JSON value

    def add(self, result: CheckResult) -> None:
        result = replace(result, name=f"{result.name}{self.mark}")
        tell = say if result.applicable else terminal.detail  # those come together, in one line at the end
        tell(f"{result.name}: {result.verdict}, {result.detail}")
        self.checks.append(result)


def run_smoke(
    paths: Paths,
    engine: Engine,
    release: Release,
    checkpoint: Path,
    *,
    gpus: bool = False,
    places: Sequence[Place] = (),
) -> tuple[SmokeResult, Write]:
    """Serve the release in a container without a network and run its stage's checks. places: as of `started`.

    The result and its evidence, for `smoke.evidence.kept`. Whatever the server does wrong is in them. One test of a
    home runs at a time.

    Raises:
        ManifestError: the record names a check that does not exist.
        EngineError, IntegrityError: the engine refuses, or the tag is gone or names another image.
        CheckpointError: the container's user could not read the checkpoint.
    """
    require_known(release.demands.checks, f"the record of {release.tag}", "demands.checks")
    running.require_readable(checkpoint)
    running.require_image(engine, release)
    begin = time.monotonic()
    with alone(paths, engine, [place.engine for place in places if place.where]):
        served: list[tuple[int, ServerEvidence]] = []
        reference = drift.reference(paths, release)
        for length, variant in drafting.variants(release):
            evidence = ServerEvidence(socket_argv(variant), f"@{length}" if served else "")
            served.append((length, evidence))
            timeout = running.ready_timeout(checkpoint)
            with started(paths, engine, variant, checkpoint, gpus=gpus, timeout=timeout, places=places) as server:
                with Client.unix(server.socket) as client:
                    examine(server, subject_of(variant, client, server, length, reference=reference), evidence)
                server.stop()
                evidence.log, evidence.other_logs = server.log(), server.other_logs()
            if evidence.ready_seconds is None:
                break  # the other lengths would tell no more
        seconds = time.monotonic() - begin
        return finished(paths, release, served, seconds, read_fingerprint(engine.version))


def smoke_served(paths: Paths, engine: Engine, release: Release, serving: Serving) -> tuple[SmokeResult, Write]:
    """The same by a server that clients can ask already."""
    require_known(release.demands.checks, f"the record of {release.tag}", "demands.checks")
    begin, length = time.monotonic(), drafting.drafted(release)
    evidence, reference = ServerEvidence(socket_argv(release)), drift.reference(paths, release)
    with alone(paths, engine):
        try:
            with serving as (container, client):
                server = Server(container, Path(), timeout=0)
                server.ready_seconds = round(time.monotonic() - begin, 1)
                examine(server, subject_of(release, client, server, length, reference=reference), evidence)
                evidence.argv, evidence.log = container.attrs["Config"]["Cmd"], server.log()
        except NotReady as fault:
            evidence.log = fault.log
            evidence.add(CheckResult("start", False, fault.message, round(time.monotonic() - begin, 2)))
    return finished(paths, release, [(length, evidence)], time.monotonic() - begin, read_fingerprint(engine.version))


def subject_of(release: Release, client: Client, server: Server, length: int, **known: Any) -> SmokeSubject:
    """length: tokens that the server drafts. known: further fields of a SmokeSubject."""
    return SmokeSubject(
        client=client,
        model=served_name(release.argv),
        expect=expectations_of(release.demands),
        log=server.log,
        other_logs=server.other_logs,
        demands=release.demands,
        argv=release.argv,
        length=length,
        **known,
    )


def examine(server: Server, subject: SmokeSubject, evidence: ServerEvidence) -> None:
    """Wait for the server unless it is ready, then run the checks until the last or until the server is gone."""
    begin = time.monotonic()
    evidence.exchanges, evidence.leaves = subject.client.exchanges, subject.leaves
    # Who drafts nothing is not asked how much of it is accepted.
    names = [name for name in subject.demands.checks if subject.length or name != "acceptance"]
    try:
        if server.ready_seconds is None:
            server.wait_ready(subject.client)
    except StartFault as fault:
        evidence.add(CheckResult("start", False, str(fault), round(time.monotonic() - begin, 2)))
        return
    evidence.ready_seconds = server.ready_seconds
    evidence.add(CheckResult("start", True, f"ready after {server.ready_seconds} s", server.ready_seconds or 0.0))
    for name in names:
        if reason := server.exit_reason():
            result = CheckResult(name, False, f"not asked: the container {reason}", 0.0)
        else:
            with waiting(f"{name}{evidence.mark} is being checked", QUIET_SECONDS):
                result = run_check(name, subject)
            exchanges = subject.client.exchanges
            if not result.passed and exchanges and exchanges[-1].fault and (reason := server.exit_reason(wait=2)):
                result = replace(result, detail=f"{result.detail}; the container {reason}")
        evidence.add(result)
    if skipped := [check.name for check in evidence.checks if not check.applicable]:
        say(f"{terminal.count(len(skipped), 'check')} not applicable ({', '.join(skipped)}): see result.json")
    with contextlib.suppress(Fault):  # for the record, whether or not the stage has a floor for it
        seen = metrics.acceptance(subject.client.get("/metrics").body.decode(errors="replace"))
        evidence.acceptance = seen if seen and seen.drafted else None


def finished(
    paths: Paths, release: Release, served: Sequence[tuple[int, ServerEvidence]], seconds: float, host: Fingerprint
) -> tuple[SmokeResult, Write]:
    """served: number of drafted tokens and what that server left, the release's own first. host: where they ran."""
    _, evidence = served[0]
    checks = tuple(check for _, each in served for check in each.checks)
    result = SmokeResult(
        passed=all(check.passed for check in checks),
        seconds=round(seconds, 1),
        ready_seconds=evidence.ready_seconds,
        checks=checks,
        acceptance=round(evidence.acceptance.share, 4) if evidence.acceptance else None,
        mods=tuple(sorted(mods.active(mods.reports(evidence.log)))),
        load_format=load_format(evidence.argv),
        weights_seconds=weights_seconds(evidence.log),
        log_path=evidence_folder(paths, release) / "server.log",
        speed=speed_of(evidence.exchanges),
    )
    record = record_of(result, release, host) | {
        "argv": list(evidence.argv),
        "env": dict(release.env),
        "drafted_tokens": evidence.acceptance.drafted if evidence.acceptance else None,
        "accepted_tokens": evidence.acceptance.accepted if evidence.acceptance else None,
        "log_path": "server.log",
    }

    def write(folder: Path) -> None:
        for length, each in served:
            name = f"-drafts-{length}" if each.mark else ""
            for file, value in each.leaves.items():
                write_json(folder / drift.marked(file, each.mark), value)
            (folder / f"server{name}.log").write_bytes(each.log)
            for rank, log in enumerate(each.other_logs, start=1):
                (folder / f"server-{rank}{name}.log").write_bytes(log)
            lines = [json.dumps(exchange.as_dict(), ensure_ascii=False) + "\n" for exchange in each.exchanges]
            (folder / f"exchanges{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        write_json(folder / "result.json", record)

    return result, write
