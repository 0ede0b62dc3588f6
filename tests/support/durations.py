"""How long tests take by file and by folder, printed at the end of a run, so that a part that grows is seen.

It is a report and fails no run. Fixtures count, in the file of the test that is the first to use them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath

import pytest

SLOW = 2.0  # seconds of a unit test
LONG = 20.0  # seconds of a file


class Durations:
    """A plugin of the process that writes the summary."""

    def __init__(self) -> None:
        self.tests, self.files, self.folders = Counter[str](), Counter[str](), Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.files[file] += report.duration
        self.folders["/".join(PurePath(file).parts[:2])] += report.duration
        if report.when == "call":
            self.tests[report.nodeid] = report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, seconds in self.tests.most_common():
            if seconds > SLOW and name.startswith("tests/unit/"):
                terminalreporter.write_line(f"slow for a unit test: {name} took {seconds:.1f} s", yellow=True)
        for times, least in ((self.files, LONG), (self.folders, SLOW)):
            for name, seconds in times.most_common():
                if seconds > least:
                    terminalreporter.write_line(f"{seconds:7.1f} s in {name}")
