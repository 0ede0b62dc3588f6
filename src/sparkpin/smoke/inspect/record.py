"""In place of a server that cannot run here: the image is inspected.

What it says is never "passed". The evidence comes to lie where a smoke test's would: inspection.json (that of
`invoke smoke TAG --inspect --json`), load.log (all that the container wrote) and result.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.files import write_json
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine
from sparkpin.host.fingerprint import read_fingerprint
from sparkpin.releases.record import Release
from sparkpin.smoke.checks import CheckResult
from sparkpin.smoke.evidence import Write, record_of
from sparkpin.smoke.inspect import report
from sparkpin.smoke.inspect.report import Result
from sparkpin.smoke.inspect.run import inspect


@dataclass(frozen=True)
class InspectedResult:
    inspected: bool  # whether nothing was found
    how: str  # in words, what was done
    why: str  # no server ran
    seconds: float
    checks: tuple[CheckResult, ...]
    passed: bool = False  # never; a server has to


def run_inspection(paths: Paths, engine: Engine, release: Release, why: str) -> tuple[InspectedResult, Write]:
    """The result and its evidence, for `smoke.evidence.kept`. Raises as `inspect` does."""
    say(f"inspected, not served: {why}")
    examined = inspect(paths, engine, release)
    report.show(examined)
    result = result_of(examined, why)
    record = record_of(result, release, read_fingerprint(engine.version))

    def write(folder: Path) -> None:
        write_json(folder / "inspection.json", examined.as_json())
        (folder / "load.log").write_bytes(examined.log)
        write_json(folder / "result.json", record)

    return result, write


def result_of(examined: Result, why: str) -> InspectedResult:
    """why: no server ran."""
    found = [CheckResult(one.rule, False, f"{one.subject}: {one.text}", 0.0) for one in examined.errors]
    checks = found or [CheckResult("inspection", True, examined.verdict, 0.0)]
    how = "inspected, emulated" if examined.emulated else "inspected"
    return InspectedResult(not found, how, why, examined.seconds, tuple(checks))
