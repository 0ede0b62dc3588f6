"""The folder that a smoke test, or what runs in its place, leaves with a release, and what is still to be found out."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkpin.core.files import PARTIAL, atomic_folder, write_json
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.host.fingerprint import Fingerprint
from sparkpin.releases.record import Release, Releases, now
from sparkpin.releases.runs_here import obstacle

FAILED = "smoke-failed"  # what the last test left that failed and was repeated, to report it
RESULT = "result.json"


@dataclass(frozen=True)
class CheckResult:
    name: str
    passed: bool
    detail: str  # what was seen, or why it could not be asked
    seconds: float
    applicable: bool = True  # whether what is served could be asked this

    @property
    def verdict(self) -> str:
        return "not applicable" if not self.applicable else "ok" if self.passed else "FAILED"


def evidence_folder(paths: Paths, release: Release) -> Path:
    return Releases(paths).evidence(release) / "smoke"


@dataclass(frozen=True)
class Evidence:
    """What a smoke test leaves, or what runs in its place. result: for the release's record; files: name -> bytes, or a
    JSON value."""

    result: dict[str, Any]
    files: dict[str, Any]

    @classmethod
    def of(cls, result: dict[str, Any], release: Release, host: Fingerprint, files: dict[str, Any]) -> Evidence:
        """host: where it ran. result.json says it again, with what is known besides: RESULT of the files."""
        known = {"release": release.tag, "image": release.image, "host": host.model_dump(mode="json"), "time": now()}
        return cls(result, files | {RESULT: result | {"schema": 1} | known | files.get(RESULT, {})})

    @property
    def failures(self) -> list[str]:
        return [f"{check['name']}: {check['detail']}" for check in self.result["checks"] if not check["passed"]]

    def write(self, folder: Path) -> None:
        for name, value in self.files.items():
            if isinstance(value, bytes):
                (folder / name).write_bytes(value)
            else:
                write_json(folder / name, value)


def store_evidence(paths: Paths, release: Release, evidence: Evidence) -> Release:
    """The release with the result in its record and the evidence in its folder. Where the record keeps what another
    run found meanwhile, that run's evidence stays, too. That of a test that failed stays beside it, as FAILED.
    """

    def place() -> None:
        for left in evidence_folder(paths, release).parent.glob(PARTIAL + "*/"):  # folders are a killed smoke test's
            shutil.rmtree(left, ignore_errors=True)
        folder = evidence_folder(paths, release)
        failed = folder.with_name(FAILED) if Releases(paths).get(release.tag).smoke_failed else None
        with replaced(folder, failed) as partial:
            evidence.write(partial)

    return Releases(paths).smoked(release.tag, evidence.result, place)


@contextlib.contextmanager
def replaced(folder: Path, aside: Path | None = None) -> Iterator[Path]:
    """A folder to fill, which then takes the place of the former one, whole. aside: where that one stays."""
    former = None
    with atomic_folder(folder) as partial:
        yield partial
        if folder.exists():
            former = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder.parent))
            if aside and aside.exists():
                aside.rename(former / aside.name)
            folder.rename(aside or former / folder.name)
    if former:
        shutil.rmtree(former)


def is_compared(release: Release) -> bool:
    """Whether its numbers were compared with those of the stage below, where they are to be (the check `drift`)."""
    checks = (release.smoke or {}).get("checks", ())
    return all(check.get("applicable", True) for check in checks if check["name"] == "drift")


def comparison_steps(paths: Paths, release: Release) -> list[str]:
    """The commands that compare them; none where they were compared."""
    if is_compared(release):
        return []
    same = (one for one in Releases(paths).of_recipe(release.recipe) if one.stage == release.demands.parent)
    first = [] if any(one.smoke_passed for one in same) else [f"{release.recipe}:{release.demands.parent}"]
    return [f"invoke smoke {tag}" for tag in (*first, release.tag)]


def owes(paths: Paths, engine: Engine, release: Release) -> bool:
    """Whether a smoke test here could tell more of a release that has not failed than its record does."""
    return release.smoke is None or (release.smoke_inspected and not obstacle(paths, engine, release))
