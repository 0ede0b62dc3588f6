"""The smoke test: a release's own image serves its own checkpoint, and real requests show whether it may be used.

The evidence comes to lie in the folder `smoke` of the release's evidence: server.log (all that the container wrote),
exchanges.jsonl (each request with the raw answer) and result.json.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sparkpin import container as running
from sparkpin import loaders
from sparkpin.container import Say
from sparkpin.engine import Engine
from sparkpin.files import lock, write_json
from sparkpin.fingerprint import Fingerprint, read_fingerprint
from sparkpin.paths import Paths
from sparkpin.recipes import flag_value, served_name
from sparkpin.releases import Release
from sparkpin.smoke import metrics, mods
from sparkpin.smoke.checks import CheckResult, require_known, run_check
from sparkpin.smoke.client import Client
from sparkpin.smoke.evidence import Write, evidence_folder
from sparkpin.smoke.expectations import expectations_of
from sparkpin.smoke.replies import Exchange, Fault
from sparkpin.smoke.server import Server, StartFault, remove_leftovers, smoke_lock, socket_argv, started
from sparkpin.smoke.subject import Subject


@dataclass(frozen=True)
class SmokeResult:
    """seconds: the whole test; ready_seconds: until the server answered, None where it never did.

    The first check is always "start". acceptance: share of drafted tokens, None where nothing is drafted.
    mods: those that reported to be active. load_format: the loader; weights_seconds: what it took, None where the log
    does not say. log_path: the container's complete log.
    """

    passed: bool
    seconds: float
    ready_seconds: float | None
    checks: tuple[CheckResult, ...]
    acceptance: float | None
    mods: tuple[str, ...]
    load_format: str
    weights_seconds: float | None
    log_path: Path

    def as_dict(self) -> dict[str, Any]:
        """For the release's record: JSON values only."""
        value = asdict(self) | {"log_path": str(self.log_path)}
        return value | {"checks": [asdict(check) for check in self.checks], "mods": list(self.mods)}


@dataclass
class Evidence:
    """What a run leaves; filled in as it goes."""

    argv: Sequence[str]
    checks: list[CheckResult]
    exchanges: list[Exchange]
    log: bytes = b""
    ready_seconds: float | None = None
    acceptance: metrics.Acceptance | None = None


def run_smoke(
    paths: Paths, engine: Engine, release: Release, checkpoint: Path, say: Say, *, gpus: bool = False
) -> tuple[SmokeResult, Write]:
    """Serve the release in a container without a network and run its stage's checks.

    The result and its evidence, for `smoke.evidence.kept`. Whatever the server does wrong is in them. Removes what
    killed runs left. One test of a home runs at a time.

    Raises:
        ManifestError: the record names a check that does not exist.
        EngineError, IntegrityError: the engine refuses, or the tag is gone or names another image.
        CheckpointError: the container's user could not read the checkpoint.
    """
    demands = release.demands
    require_known(demands.checks, f"the record of {release.tag}", "demands.checks")
    running.require_readable(checkpoint)
    running.require_image(engine, release)
    begin = time.monotonic()
    with lock(smoke_lock(paths), on_wait=lambda: say("waiting for another smoke test to end")):
        remove_leftovers(paths, engine, say)
        evidence = Evidence(socket_argv(release), [], [])
        timeout = running.ready_timeout(checkpoint)
        with started(paths, engine, release, checkpoint, gpus=gpus, timeout=timeout, say=say) as server:
            with Client.unix(server.socket) as client:
                subject = Subject(
                    client=client,
                    model=served_name(release.argv),
                    expect=expectations_of(demands),
                    log=server.log,
                    mods=frozenset(demands.mods),
                    floor=demands.acceptance_floor,
                    kernels=frozenset(demands.kernels),
                    floors=demands.position_floors,
                    argv=release.argv,
                    gpu=gpus,
                )
                examine(server, subject, demands.checks, evidence, say)
                evidence.exchanges = client.exchanges
            server.stop()
            evidence.log = server.log()
        seconds = time.monotonic() - begin
        return finished(paths, release, evidence, seconds, read_fingerprint(engine.version))


def examine(server: Server, subject: Subject, names: Sequence[str], evidence: Evidence, say: Say) -> None:
    """Wait for the server, then run the checks until the last or until the server is gone."""
    begin = time.monotonic()
    try:
        server.wait_ready(subject.client)
    except StartFault as fault:
        say(f"start: FAILED, {fault}")
        evidence.checks.append(CheckResult("start", False, str(fault), round(time.monotonic() - begin, 2)))
        return
    evidence.ready_seconds = server.ready_seconds
    detail = f"ready after {server.ready_seconds} s"
    say(f"start: ok, {detail}")
    evidence.checks.append(CheckResult("start", True, detail, server.ready_seconds or 0.0))
    for name in names:
        if reason := server.exit_reason():
            result = CheckResult(name, False, f"not asked: the container {reason}", 0.0)
        else:
            result = run_check(name, subject)
            exchanges = subject.client.exchanges
            if not result.passed and exchanges and exchanges[-1].fault and (reason := server.exit_reason(wait=2)):
                result = replace(result, detail=f"{result.detail}; the container {reason}")
        say(f"{name}: {result.verdict}, {result.detail}")
        evidence.checks.append(result)
    evidence.acceptance = measured_acceptance(subject.client)


def measured_acceptance(client: Client) -> metrics.Acceptance | None:
    """For the record, whether or not the stage has a floor for it."""
    try:
        reply = client.get("/metrics")
    except Fault:
        return None
    seen = metrics.acceptance(reply.body.decode(errors="replace"))
    return seen if seen and seen.drafted else None


def finished(
    paths: Paths, release: Release, evidence: Evidence, seconds: float, host: Fingerprint
) -> tuple[SmokeResult, Write]:
    """host: where the server ran."""
    result = SmokeResult(
        passed=all(check.passed for check in evidence.checks),
        seconds=round(seconds, 1),
        ready_seconds=evidence.ready_seconds,
        checks=tuple(evidence.checks),
        acceptance=round(evidence.acceptance.share, 4) if evidence.acceptance else None,
        mods=tuple(sorted(mods.active(mods.reports(evidence.log)))),
        load_format=flag_value(evidence.argv, loaders.FLAG) or loaders.DEFAULT,
        weights_seconds=loaders.seconds(evidence.log),
        log_path=evidence_folder(paths, release) / "server.log",
    )
    record = result.as_dict() | {
        "schema": 1,
        "release": release.tag,
        "image": release.image,
        "argv": list(evidence.argv),
        "env": dict(release.env),
        "host": host.model_dump(mode="json"),
        "drafted_tokens": evidence.acceptance.drafted if evidence.acceptance else None,
        "accepted_tokens": evidence.acceptance.accepted if evidence.acceptance else None,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "log_path": "server.log",
    }

    def write(folder: Path) -> None:
        (folder / "server.log").write_bytes(evidence.log)
        lines = [json.dumps(exchange.as_dict(), ensure_ascii=False) + "\n" for exchange in evidence.exchanges]
        (folder / "exchanges.jsonl").write_text("".join(lines), encoding="utf-8")
        write_json(folder / "result.json", record)

    return result, write
