"""All stages of the cpu stack without a network. Needs what ./install.sh leaves: the store and the releases."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import INVOKE, LONGEST, PROJECT, Checkout

from sparkpin.core.paths import Paths
from sparkpin.host.machine import SYSTEM_PATH
from sparkpin.releases.record import Release, Releases

OFFLINE = f"offline-{uuid.uuid4().hex[:8]}"  # other checkouts may test beside this one, in the same engine
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("dockerd", path=SYSTEM_PATH) is None,
        reason="needs root (for network namespaces) and dockerd (apt-get install docker.io)",
    ),
]
# -s 0: without what is sent, which may be a text about addresses.
WATCHED = ["strace", "-f", "--seccomp-bpf", "-qq", "-s", "0", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-o"]


def alone(folder: Path, *command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run in a network namespace without interfaces, in another time zone, language and umask than the first build."""
    elsewhere = {"TZ": "Asia/Tokyo", "LANG": "tr_TR.UTF-8", "PYTHONHASHSEED": "7"}
    return subprocess.run(
        ["unshare", "--net", "sh", "-c", 'umask 077; exec "$@"', "sh", *command],
        cwd=folder,
        env={**os.environ, **elsewhere, **env},
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )


def attempts(log: Path) -> list[str]:
    """The calls that named an address of the internet; a Unix socket leads to the engine and nowhere else."""
    return [line for line in log.read_text().splitlines() if "AF_INET" in line]


def test_an_attempt_to_connect_is_seen(tmp_path: Path) -> None:
    program = """
import socket
here, there = socket.socketpair()
here.send(b"AF_INET")
for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(family, kind) as one:
            try:
                one.connect((address, 9))
            except OSError:
                pass
"""
    alone(tmp_path, *WATCHED, tmp_path / "calls", sys.executable, "-c", program)
    assert len(attempts(tmp_path / "calls")) == 4


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout.make(tmp_path / "copy")
    made.add_recipe(OFFLINE)
    yield made
    made.remove_tags(OFFLINE)


def test_every_stage_comes_out_identical_in_an_engine_of_its_own(
    main_job: Releases, stages: dict[str, Release]
) -> None:
    """Both from scratch: another data root, empty caches, the root file system and every layer made anew."""
    newest = stages["v2-tq"]
    result = alone(PROJECT, *INVOKE, "reproduce", newest.tag)
    assert result.returncode == 0, result.stdout + result.stderr
    evidence = json.loads((main_job.evidence(newest) / "reproduced.json").read_text())
    assert evidence["verdict"] == "identical"
    assert [stage["stage"] for stage in evidence["stages"]] == ["base", "hybrid", "mtp", "v2", "v2-tq"]
    assert evidence["stages"][-1]["got"] == newest.image


def test_every_stage_is_built_offline_after_a_fetch(
    main_job: Releases, stages: dict[str, Release], copy: Checkout, tmp_path: Path
) -> None:
    """With what the first build left in the cache; the test above makes all of it anew, without a network either."""
    copy.done("build", "--fetch-only", "--recipe", OFFLINE)
    build = [*INVOKE, "build", "--offline", "--recipe", OFFLINE]
    result = alone(copy.folder, *WATCHED, tmp_path / "calls", *build, **copy.env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "AF_UNIX" in (tmp_path / "calls").read_text() and attempts(tmp_path / "calls") == []
    assert "same bytes as published: base, hybrid, mtp, v2, v2-tq (pins/digests/cpu.yaml)" in result.stdout
    made = {
        release.stage: release.image for release in Releases(Paths(copy.folder, main_job.paths.cache, copy.home)).all()
    }
    assert made == {stage: release.image for stage, release in stages.items()}
