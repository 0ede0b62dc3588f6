"""The result of an inspection: for people a table and a verdict, for machines JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparkpin import ui
from sparkpin.inspection.finding import Finding
from sparkpin.inspection.gpu import Coverage, coverages
from sparkpin.inspection.kernels import ahead
from sparkpin.inspection.packages import PLUGINS
from sparkpin.inspection.rules import cuda_release, minimum_driver
from sparkpin.inspection.scan import Facts

FORMAT = 1
SITE = re.compile(r"[^\s(]*/(site|dist)-packages/(?=[^\s])")
WORDS = {"error": "ERROR", "warning": "warning", "note": "note", "allowed": "allowed"}


@dataclass(frozen=True)
class Result:
    """subject: tag or folder. sm: the GPU that was asked for (121), None for none."""

    subject: str
    platform: str
    sm: int | None
    facts: Facts
    findings: Sequence[Finding]

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def coverages(self) -> list[Coverage]:
        return sorted(coverages(self.facts, self.sm), key=lambda row: row.path) if self.sm else []

    @property
    def verdict(self) -> str:
        gpu = f" for sm_{self.sm}" if self.sm else ""
        return f"{'fails' if self.errors else 'inspected'}{gpu}: {counted(self.findings)}"

    def as_json(self) -> dict[str, Any]:
        facts = self.facts
        return {
            "format": FORMAT,
            "subject": self.subject,
            "platform": self.platform,
            "sm": self.sm,
            "passed": not self.errors,
            "verdict": self.verdict,
            "files": facts.files,
            "bytes": facts.size,
            "libraries": len(facts.libraries),
            "cuda": cuda_release(facts),
            "minimum_driver": minimum_driver(facts),
            "torch": facts.torch and {"version": facts.torch.version, "cuda": facts.torch.cuda},
            "packages": [{"name": p.name, "version": p.version, "folder": p.folder} for p in facts.packages],
            "plugins": {p.name: list(p.plugins) for p in facts.packages if p.plugins},
            "gpu": [
                {**asdict(row), "archs": dict(row.archs), "verdict": row.verdict}  #
                for row in self.coverages
            ],
            "kernels": [{**asdict(row), "archs": dict(row.archs)} for row in ahead(facts, self.sm)] if self.sm else [],
            "findings": [asdict(finding) for finding in self.findings],
        }


def counted(findings: Sequence[Finding]) -> str:
    """ "1 error, 2 warnings, 3 notes, 4 allowed" """
    seen: Mapping[str, int] = Counter(finding.severity for finding in findings)
    words = [ui.count(seen.get(kind, 0), kind) for kind in ("error", "warning", "note")]
    return ", ".join([*words, f"{seen.get('allowed', 0)} allowed with a reason"])


def show(result: Result) -> None:
    facts = result.facts
    ui.show(
        f"{result.subject}: {result.platform}, {facts.files} files, {ui.size(facts.size)}, "
        f"{len(facts.libraries)} libraries and programs, {len(facts.packages)} Python packages"
    )
    vllm, torch, cuda = facts.package("vllm"), facts.torch, cuda_release(facts)
    lines = [f"vLLM {vllm.version if vllm else 'none'}; torch {torch.version if torch else 'none'}; {PLUGINS}:"]
    for package in facts.packages:
        if package.plugins:
            made = f", for vLLM {', '.join(package.accepts)}" if package.accepts else ""
            lines.append(f"  {package.name} {package.version}{made}")
    if cuda:
        lines.append(f"CUDA {cuda}, driver {minimum_driver(facts) or 'not known'} or newer")
    for line in lines:
        ui.show(ui.printable(line))
    if result.coverages:
        ui.show()
        rows = [
            (short(row.path), row.verdict, row.runs, row.compiles, row.neither, archs(row)) for row in result.coverages
        ]
        ui.table(("library", f"sm_{result.sm}", "runs", "PTX", "neither", "holds"), rows)
    if result.findings:
        ui.show()
        ui.table(("", "rule", "what", "why"), rows_of(result.findings))
    ui.show()
    ui.show(result.verdict)


def short(text: str) -> str:
    """Without the folder that all Python packages lie in, and without what a terminal would obey."""
    return ui.printable(SITE.sub("", text))


def archs(row: Coverage) -> str:
    return ", ".join(f"{count} {name}" for name, count in row.archs)


def rows_of(findings: Sequence[Finding]) -> list[tuple[str, str, str, str]]:
    """One row a finding; of what is allowed one row a reason."""
    rows = []
    reasons: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        if one.severity == "allowed":
            reasons.setdefault((one.rule, one.why), []).append(one)
        else:
            rows.append((WORDS[one.severity], one.rule, short(one.subject), short(one.text)))
    for (rule, why), same in reasons.items():
        names = dict.fromkeys(ui.printable(one.subject.rpartition("/")[2]) for one in same)
        what = f"{next(iter(names))} and {len(names) - 1} more" if len(names) > 1 else next(iter(names))
        rows.append((WORDS["allowed"], rule, what, why))
    return rows
