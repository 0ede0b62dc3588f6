"""The machine in a release's record: its kind and nothing that tells it from another of its kind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from made_releases import release
from test_machine import GB10, SPARK, root_with

from sparkpin.core.errors import ManifestError
from sparkpin.core.paths import Paths
from sparkpin.distribute import bundle, layout
from sparkpin.host import fingerprint, machine
from sparkpin.host.fingerprint import Fingerprint
from sparkpin.releases.record import Releases, to_json

SERIAL = "1234567890123"
FILES = {
    "etc/hostname": "annas-spark\n",
    "etc/machine-id": "0123456789abcdef0123456789abcdef\n",
    "proc/cpuinfo": "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd85\nprocessor\t: 1\nCPU part\t: 0xd87\n",
    "sys/class/dmi/id/product_name": "NVIDIA_DGX_Spark\n",
    "sys/class/dmi/id/product_serial": f"{SERIAL}\n",
    "sys/class/dmi/id/product_uuid": f"{SERIAL}-uuid\n",
}


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fingerprint:
    """nvidia-smi's answer is made up (there is no GPU here): that of an H200, with a GB10's name."""
    monkeypatch.setattr(machine, "ROOT", root_with(tmp_path / "root", SPARK, FILES))
    monkeypatch.setattr(machine, "output", lambda argv: GB10 if argv == machine.QUERY else None)
    return fingerprint.read_fingerprint("29.2.1")


def test_it_has_the_kind_of_machine_and_nothing_that_names_this_one(found: Fingerprint) -> None:
    assert found.model_dump(exclude={"arch", "cores", "kernel"}) == {
        "machine": "NVIDIA_DGX_Spark",
        "cpu": "Arm 0x41 0xd85",
        "memory": 128_000_000_000,
        "gpus": ({"name": "NVIDIA GB10", "compute_capability": "12.1", "driver": "580.159.04"},),
        "os": "ubuntu 24.04",
        "docker": "29.2.1",
    }
    assert (found.arch, found.kernel) == (os.uname().machine, os.uname().release)
    assert os.uname().nodename not in found.model_dump_json()


def test_a_record_keeps_it_and_a_bundle_carries_it_and_no_key_has_it(found: Fingerprint, tmp_path: Path) -> None:
    records = Releases(Paths(tmp_path, tmp_path / "cache", tmp_path / "home"))
    made, without = release(1, host=found), release(1)
    assert (made.key, made.build_key, made.tag) == (without.key, without.build_key, without.tag), "it is in no key"
    records.save(made)
    assert records.find(made.tag) == made == bundle.read_release(layout.as_json(to_json(made)))
    path = records.record_path(made)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": {"hostname": "annas-spark"}}))
    with pytest.raises(ManifestError, match="host"):
        records.find(made.tag)
