"""All stages of the cpu stack without a network. Needs what ./install.sh leaves: the store and the releases."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkout import PROJECT, Checkout
from sparkpin.daemon import SYSTEM_PATH
from sparkpin.paths import Paths
from sparkpin.releases import Releases

INVOKE = Path(sys.executable).parent / "invoke"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("dockerd", path=SYSTEM_PATH) is None,
        reason="needs root (for network namespaces) and dockerd (apt-get install docker.io)",
    ),
]
# Runs a command in a network namespace without any interface that is up, then says what it tried to send.
ALONE = """
umask 077
"$@"
code=$?
for row in Ip:OutNoRoutes Tcp:ActiveOpens Udp:OutDatagrams; do
  awk -v kind="${row%%:*}:" -v name="${row#*:}" '
    $1 == kind && !columns { split($0, names); columns = NF; next }
    $1 == kind { for (i = 2; i <= columns; i++) if (names[i] == name) print "sent", name, $i }' /proc/net/snmp
done
exit $code
"""
SILENT = ["sent OutNoRoutes 0", "sent ActiveOpens 0", "sent OutDatagrams 0"]


@pytest.fixture(scope="module")
def main_job() -> Releases:
    subprocess.run([INVOKE, "up"], cwd=PROJECT, check=True)
    return Releases(Paths.from_env(PROJECT))


def alone(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run an invoke task without network, in another time zone, language and umask than the first build."""
    elsewhere = {"TZ": "Asia/Tokyo", "LANG": "tr_TR.UTF-8", "PYTHONHASHSEED": "7"}
    return subprocess.run(
        ["unshare", "--net", "sh", "-c", ALONE, "sh", INVOKE, *arguments],
        cwd=folder,
        env={**os.environ, **elsewhere, **env},
        capture_output=True,
        text=True,
        timeout=900,
    )


def sent(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.startswith("sent ")]


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout.make(tmp_path / "copy")
    made.add_recipe("offline")
    yield made
    made.remove_tags("offline")


def test_every_stage_comes_out_identical_in_an_engine_of_its_own(main_job: Releases) -> None:
    """Both from scratch: another data root, empty caches, the root file system and every layer made anew."""
    newest = [release for release in main_job.of_recipe("scripted-tiny") if release.stage == "v2-tq"][-1]
    result = alone(PROJECT, "reproduce", "--release", newest.tag)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sent(result) == SILENT
    evidence = json.loads((main_job.evidence(newest) / "reproduced.json").read_text())
    assert evidence["verdict"] == "identical"
    assert [stage["stage"] for stage in evidence["stages"]] == ["base", "hybrid", "mtp", "v2", "v2-tq"]
    assert evidence["stages"][-1]["got"] == newest.image


def test_every_stage_is_built_offline_after_a_fetch(main_job: Releases, copy: Checkout, tmp_path: Path) -> None:
    """From a cache that holds the store and nothing else; the machine's engine may remember steps."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "store").symlink_to(main_job.paths.store)
    environment = {**copy.env, "SPARKPIN_CACHE": str(cache)}
    fetched = copy.invoke("fetch", "--recipe", "offline", SPARKPIN_CACHE=str(cache))
    assert fetched.returncode == 0, fetched.stderr
    result = alone(copy.folder, "build", "--offline", "--recipe", "offline", **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sent(result) == SILENT
    made = {release.stage: release.image for release in Releases(Paths(copy.folder, cache, copy.home)).all()}
    assert made == {release.stage: release.image for release in main_job.of_recipe("scripted-tiny")}


def test_what_is_missing_is_told_before_anything_is_built(copy: Checkout, tmp_path: Path) -> None:
    environment = {**copy.env, "SPARKPIN_CACHE": str(tmp_path / "empty")}
    result = alone(copy.folder, "build", "--offline", "--recipe", "offline", **environment)
    assert result.returncode == 2
    assert "locked files are not in the store" in result.stderr and "invoke fetch" in result.stderr
    assert sent(result) == SILENT
