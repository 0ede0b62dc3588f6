"""In place of a server that cannot run here: the image is inspected and, if wanted, its libraries are loaded.

What it says is never "passed". The evidence comes to lie where a smoke test's would: inspection.json (that of
`invoke smoke TAG --inspect --json`), load.log (all that the load's container wrote) and result.json.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core import terminal
from sparkpin.core.files import write_json
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine
from sparkpin.host.fingerprint import read_fingerprint
from sparkpin.releases import container as running
from sparkpin.releases.record import Release
from sparkpin.smoke.checks import CheckResult
from sparkpin.smoke.evidence import Write, record_of
from sparkpin.smoke.inspect import report
from sparkpin.smoke.inspect.report import Result
from sparkpin.smoke.inspect.run import inspect
from sparkpin.smoke.load.run import Loaded, run_load

INSPECTED, LOADED, EMULATED = "inspected", "inspected, load without GPU", "inspected, emulated load"


@dataclass(frozen=True)
class InspectedResult:
    inspected: bool  # whether nothing was found
    how: str  # in words, what was done
    loaded: bool  # whether that included the load
    why: str  # no server ran
    seconds: float
    checks: tuple[CheckResult, ...]
    passed: bool = False  # never; a server has to


def run_inspection(
    paths: Paths, engine: Engine, release: Release, why: str, *, load: bool = False
) -> tuple[InspectedResult, Write]:
    """Examine the release's image without running it; load: then load its libraries and plugins, too.

    The result and its evidence, for `smoke.evidence.kept`.

    Raises EngineError, IntegrityError as the smoke test does; HostError where nothing of the image can run here.
    """
    running.require_image(engine, release)
    begin = time.monotonic()
    say(f"inspected, not served: {why}")
    examined = inspect(paths, engine, release.tag, sm=None)
    report.show(examined)
    terminal.show(examined.verdict)
    loaded = run_load(paths, engine, release, examined.facts, examined.platform) if load else None
    if loaded:
        show_load(loaded)
    result = result_of(examined, loaded, why, round(time.monotonic() - begin, 1))
    return result, evidence_of(release, engine, examined, loaded, result)


def result_of(examined: Result, loaded: Loaded | None, why: str, seconds: float) -> InspectedResult:
    checks = [CheckResult(one.rule, False, f"{one.subject}: {one.text}", 0.0) for one in examined.errors]
    checks = checks or [CheckResult("inspection", True, examined.verdict, 0.0)]
    checks += [CheckResult(row.label, row.passed, row.told, row.seconds) for row in loaded.rows] if loaded else []
    how = INSPECTED if loaded is None else EMULATED if loaded.emulated else LOADED
    return InspectedResult(all(one.passed for one in checks), how, loaded is not None, why, seconds, tuple(checks))


def show_load(loaded: Loaded) -> None:
    """What came of it; each step was printed as it ended."""
    failed = sum(not row.passed for row in loaded.rows)
    refused = [terminal.printable(row.name) for row in loaded.rows if row.state == "refused"]
    verdict = f"{terminal.count(failed, 'step')} failed" if failed else "nothing failed"
    without = f"; refused without a GPU: {', '.join(refused)}" if refused else ""
    terminal.show(f"{'emulated' if loaded.emulated else 'native'} load, {loaded.seconds:.0f} s: {verdict}{without}")


def evidence_of(
    release: Release, engine: Engine, examined: Result, loaded: Loaded | None, result: InspectedResult
) -> Write:
    record = record_of(result, release, read_fingerprint(engine.version))
    record["stubbed"] = loaded.stubbed if loaded else None

    def write(folder: Path) -> None:
        write_json(folder / "inspection.json", examined.as_json())
        if loaded:
            (folder / "load.log").write_bytes(loaded.log)
        write_json(folder / "result.json", record)

    return write
