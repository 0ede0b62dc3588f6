"""The smoke test: a release's own image serves its own checkpoint, and real requests show whether it may be used.

The evidence comes to lie in the folder `smoke` of the release's evidence: server.log (all that the container wrote;
server-1.log and so on for further nodes), exchanges.jsonl (each request with the raw answer), result.json and what
checks leave (`drift`: logprobs.json).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sparkpin.core import terminal
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine
from sparkpin.host.fingerprint import Fingerprint, read_fingerprint
from sparkpin.pins.vllm_flags import served_name
from sparkpin.releases.record import Release
from sparkpin.smoke import logprobs, metrics, mods
from sparkpin.smoke.answers import speed_of
from sparkpin.smoke.checks import run_check
from sparkpin.smoke.client import Client, Exchange, Fault
from sparkpin.smoke.demands import require_known
from sparkpin.smoke.evidence import RESULT, CheckResult, Evidence
from sparkpin.smoke.expectations import expectations_of
from sparkpin.smoke.server import Server, Serving
from sparkpin.smoke.startup import NotReady
from sparkpin.smoke.subject import SmokeSubject

QUIET_SECONDS = 10.0  # that a check may take before a line of progress


@dataclass
class ServerEvidence:
    """What a server leaves; filled in as it goes."""

    argv: Sequence[str] = ()
    checks: list[CheckResult] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    logs: tuple[bytes, ...] = (b"",)  # by rank
    acceptance: metrics.DraftCounts | None = None
    leaves: dict[str, Any] = field(default_factory=dict)  # file -> JSON value

    def add(self, result: CheckResult) -> None:
        if result.applicable:  # what is not is printed together, at the end
            say(f"{result.name}: {result.verdict}, {result.detail}")
        self.checks.append(result)


def run_smoke(paths: Paths, engine: Engine, release: Release, serving: Serving) -> Evidence:
    """Run the checks of the release's stage: by a server of their own, or by one that stays.

    Whatever the server does wrong is in the evidence. One test of a home runs at a time: `serving` sees to that, or the
    caller. ManifestError where the record names a check that does not exist.
    """
    require_known(release.demands.checks, f"the record of {release.tag}", "demands.checks")
    evidence, reference, begin = ServerEvidence(), logprobs.reference(paths, release), time.monotonic()
    try:
        with serving as (server, client):
            ready = server.start_seconds or time.monotonic() - begin
            evidence.add(CheckResult("start", True, f"ready after {ready:.1f} s", round(ready, 2)))
            begin = time.monotonic() - ready  # not since it waited for others
            examine(server, subject_of(release, client, server, reference=reference), evidence)
            server.stop()
            evidence.argv, evidence.logs = server.argv, server.logs()
    except NotReady as fault:
        evidence.logs = fault.logs
        evidence.add(CheckResult("start", False, fault.message, round(time.monotonic() - begin, 2)))
    return finished(release, evidence, time.monotonic() - begin, read_fingerprint(engine.version))


def subject_of(release: Release, client: Client, server: Server, **known: Any) -> SmokeSubject:
    """known: further fields of a SmokeSubject."""
    model, expect = served_name(release.argv), expectations_of(release.demands)
    return SmokeSubject(client, model, expect, server.logs, release.demands, release.argv, **known)


def examine(server: Server, subject: SmokeSubject, evidence: ServerEvidence) -> None:
    """Run the checks until the last or until the server is gone."""
    evidence.exchanges, evidence.leaves = subject.client.exchanges, subject.leaves
    for name in subject.demands.checks:
        if reason := server.exit_reason():
            evidence.add(CheckResult(name, False, f"not asked: the container {reason}", 0.0))
            continue
        with waiting(f"{name} is being checked", QUIET_SECONDS):
            result = run_check(name, subject)
        last = evidence.exchanges[-1:]
        if not result.passed and last and last[0].fault and (reason := server.exit_reason(wait=2)):
            result = replace(result, detail=f"{result.detail}; the container {reason}")
        evidence.add(result)
    if skipped := skipped_line(evidence.checks):
        say(skipped)
    with contextlib.suppress(Fault):  # for the record, whether or not the stage has a floor for it
        counts = metrics.DraftCounts.read(subject.client.metrics())
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


def finished(release: Release, left: ServerEvidence, seconds: float, host: Fingerprint) -> Evidence:
    """host: where the server ran."""
    counts, log, start = left.acceptance, left.logs[0], left.checks[0]
    result = {
        "passed": all(check.passed for check in left.checks),
        "seconds": round(seconds, 1),
        "ready_seconds": start.seconds if start.passed else None,
        "checks": [asdict(check) for check in left.checks],  # the first is always "start"
        "acceptance": round(counts.share, 4) if counts else None,
        "mods": sorted(mods.active(mods.reports(log))),
        "speed": speed_of(left.exchanges),
    }
    drafted, accepted = (counts.drafted, counts.accepted) if counts else (None, None)
    more = {"argv": list(left.argv), "drafted_tokens": drafted, "accepted_tokens": accepted}
    logs = {f"server-{rank}.log" if rank else "server.log": log for rank, log in enumerate(left.logs)}
    lines = "".join(json.dumps(exchange.as_dict(), ensure_ascii=False) + "\n" for exchange in left.exchanges)
    return Evidence.of(result, release, host, {**left.leaves, **logs, "exchanges.jsonl": lines.encode(), RESULT: more})
