"""How long tests take: kept in pytest's cache, so that one that gets slow is told. It is a report and fails no run.

Each test's own time, without its fixtures, which the first test that wants them pays for; those are told by file.
In CI, where no earlier run is known, each file's sum is told, too.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Mapping

import pytest

KEY = "sparkpin/durations"
KEPT = 5  # runs
SLOW = 2.0  # seconds
LONG = {
    "e2e/serve/test_two_engines.py": 600,
    "e2e/serve/test_serving_vllm.py": 430,
    "e2e/measure/test_prove_vllm.py": 260,
    "e2e/build/test_offline.py": 240,
    "e2e/build/test_end_to_end.py": 220,
    "e2e/build/test_draft_vocabulary.py": 200,
    "e2e/build/test_mods_in_image.py": 200,
    "adversary/test_kills_of_makers.py": 180,
    "adversary/test_kills.py": 180,
    "e2e/commands/test_up_order.py": 140,
    "e2e/fetch/test_gguf_wheel.py": 130,
    "e2e/smoke/test_smoke_sabotage.py": 110,
}
"""Seconds on two busy cores by file below tests/, where no earlier run is known: CI tells them. What is in
adversary/serve/ is left out: its clients are timed, and late beside the first of these, which keeps both cores busy."""


class Durations:
    """A plugin of the process that writes the summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.cache = cache_of(config)
        self.kept = kept(config)
        self.whole_files = not config.option.keyword and not any("::" in arg for arg in config.args)
        self.seconds: Counter[str] = Counter()
        """Of this run: by test, and by "FILE (fixtures)"."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        if report.when == "call":
            self.seconds[report.nodeid] = report.duration
        elif self.whole_files:
            self.seconds[f"{file} (fixtures)"] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, seconds in self.seconds.most_common():
            usual = statistics.median(self.kept.get(name, [seconds]))
            if seconds > max(SLOW, 2 * usual):
                terminalreporter.write_line(f"slower: {name} took {seconds:.1f} s, usually {usual:.1f} s", yellow=True)
            elif seconds > SLOW and name.startswith("tests/unit/"):
                terminalreporter.write_line(f"slow for a unit test: {name} took {seconds:.1f} s", yellow=True)
        for file, seconds in by_file(self.seconds).most_common() if os.environ.get("CI") else ():
            if seconds > SLOW:
                terminalreporter.write_line(f"{seconds:7.1f} s in {file}")

    def pytest_sessionfinish(self) -> None:
        for name, seconds in self.seconds.items():
            self.kept[name] = [*self.kept.get(name, []), round(seconds, 2)][-KEPT:]
        if self.cache:
            self.cache.set(KEY, self.kept)


def cache_of(config: pytest.Config) -> pytest.Cache | None:
    """None under `-p no:cacheprovider`."""
    return getattr(config, "cache", None)


def kept(config: pytest.Config) -> dict[str, list[float]]:
    """Seconds of the last runs, by test and by file's fixtures."""
    cache = cache_of(config)
    return dict(cache.get(KEY, {})) if cache else {}


def of_files(config: pytest.Config) -> Counter[str]:
    """What each file took, by its kept times; where there are none, by LONG."""
    files = by_file({name: statistics.median(seconds) for name, seconds in kept(config).items()})
    return Counter({**{f"tests/{file}": seconds for file, seconds in LONG.items()}, **files})


def by_file(seconds: Mapping[str, float]) -> Counter[str]:
    """The sums. seconds: as in `Durations.seconds`."""
    files: Counter[str] = Counter()
    for name, one in seconds.items():
        files[name.partition("::")[0].removesuffix(" (fixtures)")] += one
    return files
