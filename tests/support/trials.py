"""The trials of tests/adversary/, counted at the end of a run by file: a test is one, unless it records "trials"."""

from __future__ import annotations

from collections import Counter

import pytest


class Trials:
    """A plugin of the process that writes the summary."""

    def __init__(self) -> None:
        self.made, self.through = Counter[str](), Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        if file.startswith("tests/adversary/") and report.when == "call":
            self.made[file] += int(dict(report.user_properties).get("trials", 1))
            self.through[file] += report.failed

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for file, made in sorted(self.made.items()):
            came = f"{self.through[file]} tests failed" if self.through[file] else "nothing came through"
            terminalreporter.write_line(f"trials by an enemy: {made:4} in {file}, {came}")
