"""The result of an inspection: for people a table and a verdict, for machines JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparkpin.core import terminal
from sparkpin.smoke.inspect.facts import ImageFacts, ImageFinding
from sparkpin.smoke.inspect.gpu import coverages
from sparkpin.smoke.inspect.rules import cuda_release, minimum_driver

FORMAT = 2
SITE = re.compile(r"[^\s(]*/(site|dist)-packages/(?=[^\s])")


@dataclass(frozen=True)
class Result:
    subject: str  # tag
    platform: str
    sm: int | None  # the GPU that was asked for (121)
    facts: ImageFacts
    findings: Sequence[ImageFinding]
    log: bytes = b""
    seconds: float = 0.0
    emulated: bool = False  # whether another machine's code ran

    @property
    def errors(self) -> list[ImageFinding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def verdict(self) -> str:
        counts = Counter[str](finding.severity for finding in self.findings)
        words = [terminal.count(counts[kind], kind) for kind in ("error", "warning", "note")]
        counted = ", ".join([*words, f"{counts['allowed']} allowed with a reason"])
        return f"{'fails' if self.errors else 'inspected'}{f' for sm_{self.sm}' if self.sm else ''}: {counted}"

    def as_json(self) -> dict[str, Any]:
        facts, names = self.facts, ("subject", "platform", "emulated", "seconds", "sm", "verdict")
        return {name: getattr(self, name) for name in names} | {
            "format": FORMAT,
            "passed": not self.errors,
            "cuda": cuda_release(facts),
            "minimum_driver": minimum_driver(facts),
            "gpu": [asdict(row) for row in coverages(facts, self.sm)] if self.sm else [],
            "steps": [asdict(row) for row in facts.steps if row.state != "begin"],
            "findings": [asdict(finding) for finding in self.findings],
        }


def show(result: Result) -> None:
    """The findings with the verdict; of the libraries with GPU code only how many have what."""
    facts = result.facts
    how = "emulated" if result.emulated else "native"
    count = len(facts.fact("libraries") or ())
    terminal.show(
        f"{result.subject}: {result.platform}, {how}, {result.seconds:.0f} s, {count} libraries, "
        f"{len(facts.packages)} Python packages"
    )
    lines = [f"vLLM {facts.version('vllm') or 'none'}; torch {(facts.fact('torch') or {}).get('version', 'none')}"]
    if cuda := cuda_release(facts):
        lines.append(f"CUDA {cuda}, driver {minimum_driver(facts) or 'not known'} or newer")
    if result.sm:
        counts = Counter(row.verdict for row in coverages(facts, result.sm))
        words = ", ".join(f"{verdict} {counts[verdict]}" for verdict in ("runs", "PTX only", "none"))
        lines.append(f"libraries with GPU code, on sm_{result.sm}: {words}")
    terminal.show("\n".join(map(terminal.printable, lines)))
    if result.findings:
        terminal.show()
        terminal.table(("", "rule", "what", "why"), rows_of(result.findings))
    terminal.show()
    terminal.show(result.verdict)


def rows_of(findings: Sequence[ImageFinding]) -> list[tuple[str, str, str, str]]:
    """One row a finding, without the folder that all Python packages lie in; of what is allowed one row a reason."""
    rows: list[tuple[str, str, str, str]] = []
    reasons: dict[tuple[str, str], list[ImageFinding]] = {}
    for one in findings:
        if one.severity == "allowed":
            reasons.setdefault((one.rule, one.why), []).append(one)
        else:
            word = "ERROR" if one.severity == "error" else one.severity
            rows.append((word, one.rule, SITE.sub("", one.subject), SITE.sub("", one.text)))
    for (rule, why), same in reasons.items():
        first, *others = dict.fromkeys(one.subject.rpartition("/")[2] for one in same)
        rows.append(("allowed", rule, f"{first} and {len(others)} more" if others else first, why))
    return rows
