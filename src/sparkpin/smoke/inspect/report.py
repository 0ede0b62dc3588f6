"""The result of an inspection: for people a table and a verdict, for machines JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparkpin.core import terminal
from sparkpin.smoke.inspect.finding import ImageFinding
from sparkpin.smoke.inspect.gpu import Coverage, Verdict, ahead, coverages
from sparkpin.smoke.inspect.rules import cuda_release, minimum_driver
from sparkpin.smoke.inspect.scan import ImageFacts

FORMAT = 1
SUMS: dict[Verdict, str] = {"runs": "libraries have it", "PTX only": "PTX only", "none": "none"}
SITE = re.compile(r"[^\s(]*/(site|dist)-packages/(?=[^\s])")


@dataclass(frozen=True)
class Result:
    subject: str  # tag or folder
    platform: str
    sm: int | None  # the GPU that was asked for (121)
    facts: ImageFacts
    findings: Sequence[ImageFinding]

    @property
    def errors(self) -> list[ImageFinding]:
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
            "gpu": [asdict(row) | {"archs": dict(row.archs), "verdict": row.verdict} for row in self.coverages],
            "kernels": [asdict(row) for row in ahead(facts)] if self.sm else [],
            "findings": [asdict(finding) for finding in self.findings],
        }


def counted(findings: Sequence[ImageFinding]) -> str:
    """ "1 error, 2 warnings, 3 notes, 4 allowed" """
    seen = Counter[str](finding.severity for finding in findings)
    words = [terminal.count(seen[kind], kind) for kind in ("error", "warning", "note")]
    return ", ".join([*words, f"{seen['allowed']} allowed with a reason"])


def show(result: Result) -> None:
    """All but the verdict; of the libraries with GPU code only how many have what."""
    facts = result.facts
    terminal.show(
        f"{result.subject}: {result.platform}, {facts.files} files, {terminal.size(facts.size)}, "
        f"{len(facts.libraries)} libraries and programs, {len(facts.packages)} Python packages"
    )
    vllm, torch, cuda = facts.package("vllm"), facts.torch, cuda_release(facts)
    lines = [f"vLLM {vllm.version if vllm else 'none'}; torch {torch.version if torch else 'none'}"]
    for one in (package for package in facts.packages if package.plugins):
        lines.append(f"plugin {one.name} {one.version}, for vLLM {', '.join(one.accepts) or 'any'}")
    if cuda:
        lines.append(f"CUDA {cuda}, driver {minimum_driver(facts) or 'not known'} or newer")
    if rows := result.coverages:
        seen = Counter(row.verdict for row in rows)
        counts = [f"{seen[verdict]} {words}" for verdict, words in SUMS.items()]
        lines.append(f"GPU code for sm_{result.sm}: {', '.join(counts)}")
    for line in lines:
        terminal.show(terminal.printable(line))
    if result.findings:
        terminal.show()
        terminal.table(("", "rule", "what", "why"), rows_of(result.findings))
    terminal.show()


def short(text: str) -> str:
    """Without the folder that all Python packages lie in, and without what a terminal would obey."""
    return terminal.printable(SITE.sub("", text))


def rows_of(findings: Sequence[ImageFinding]) -> list[tuple[str, str, str, str]]:
    """One row a finding; of what is allowed one row a reason."""
    rows: list[tuple[str, str, str, str]] = []
    reasons: dict[tuple[str, str], list[ImageFinding]] = {}
    for one in findings:
        if one.severity == "allowed":
            reasons.setdefault((one.rule, one.why), []).append(one)
        else:
            rows.append(
                ("ERROR" if one.severity == "error" else one.severity, one.rule, short(one.subject), short(one.text))
            )
    for (rule, why), same in reasons.items():
        names = dict.fromkeys(terminal.printable(one.subject.rpartition("/")[2]) for one in same)
        what = f"{next(iter(names))} and {len(names) - 1} more" if len(names) > 1 else next(iter(names))
        rows.append(("allowed", rule, what, why))
    return rows
