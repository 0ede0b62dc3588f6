"""`invoke bench` for real: a server of the cpu stack, and its clients. Needs ./install.sh's images."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest
from checkout import INVOKE, PROJECT

from sparkpin.core import files
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.measure.bench import record
from sparkpin.releases.record import Release, Releases, to_json
from sparkpin.smoke.server import LABEL, owner

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Home:
    """A home with one release of the machine's own, so that a benchmark of a test stands in nobody's evidence."""

    paths: Paths
    release: Release

    def done(self, *arguments: str) -> str:
        """Output of a task that must succeed."""
        env = {**os.environ, "SPARKPIN_HOME": str(self.paths.home)}
        result = subprocess.run([*INVOKE, *arguments], cwd=PROJECT, env=env, capture_output=True, text=True)
        assert result.returncode == 0, f"invoke {' '.join(arguments)}:\n{result.stdout}{result.stderr}"
        return result.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, stages: dict[str, Release]) -> Home:
    machine = Paths.from_env(PROJECT)
    known = stages["mtp"]
    own = Paths(PROJECT, machine.cache, tmp_path_factory.mktemp("bench") / "home")
    files.write_json(Releases(own).record_path(known), to_json(known))
    shutil.copytree(Releases(machine).checkpoint(known), Releases(own).checkpoint(known))
    for kept in ("inputs", "images"):  # what it was made from, and how: a record is held to that
        (own.home / kept).symlink_to(machine.home / kept)
    return Home(own, known)


@pytest.fixture(scope="module")
def measured(home: Home) -> dict[str, Any]:
    """What one run of all kinds of cells prints."""
    found = json.loads(home.done("bench", home.release.tag, "--quick", "--json"))
    assert isinstance(found, dict)
    return found


def test_what_is_printed_is_what_is_kept(home: Home, measured: dict[str, Any]) -> None:
    paths, release = home.paths, home.release
    kept = record.newest(paths, release)
    assert kept and record.to_json(kept) == measured
    assert kept.conditions.release == release.tag and kept.conditions.image == release.image
    assert kept.conditions.vllm.startswith("0.32.0") and kept.conditions.host.cores > 0
    assert kept.start_seconds and kept.memory and kept.memory > 500e6


def test_tokens_are_those_that_the_server_counts(measured: dict[str, Any]) -> None:
    cells = {row["name"]: row for row in measured["benchmarks"]}
    assert list(cells) == ["Q&A", "Code", "JSON", "Math", "LongCode", "128 x 1", "128 x 4"]
    for row in cells.values():
        requests = row["concurrency"] * row["batches"]
        assert (row["completed"], row["failed"], row["others"]) == (requests, 0, 0), row
        assert row["output_tokens"] == requests * row["response_size"], row
    assert cells["128 x 4"]["prompt_size"] == 128 and cells["Q&A"]["prompt_size"] > 10


def test_a_part_of_the_stream_carries_several_tokens(measured: dict[str, Any]) -> None:
    """Two drafted tokens, all of the scripted answers accepted: a tool that counts parts sees a third of the speed."""
    for row in measured["benchmarks"][:5]:
        assert row["later_parts"] <= 0.5 * row["later_tokens"], row
        assert row["accepted"] >= 0.8 * row["drafted"] > 0
        assert len(row["accepted_by_position"]) == 2


def test_a_release_is_compared_in_turns(home: Home, measured: dict[str, Any]) -> None:
    """With itself: two turns, each with a server of its own."""
    before = record.history(home.paths, home.release)
    tag = home.release.tag
    found = json.loads(home.done("bench", tag, "--compare", tag, "--rounds", "1", "--quick", "--json"))
    assert (found["order"], found["failed"]) == ("AB", 0)
    assert {row["metric"] for row in found["ratios"]} == {"output_rate", "decode_rate", "ttft"}
    assert len(list(record.folder(home.paths, home.release).glob(f"{record.COMPARE}*"))) == 1
    assert record.history(home.paths, home.release) == before


def test_nothing_is_left_behind(home: Home, measured: dict[str, Any]) -> None:
    label = f"{LABEL}={owner(home.paths)}"
    assert Engine.connect().client.containers.list(all=True, filters={"label": label}) == []
    assert not list(home.paths.releases.rglob(".partial-*"))
