"""The smoke test of a server that stays, at the address of its clients: the same evidence, faults that are results."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest
from watched import free_port

from sparkpin.cli.up import stop_unless_current
from sparkpin.core.errors import SmokeError
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import service
from sparkpin.serve.address import Address, key_path
from sparkpin.serve.served import Served, Service, status, write
from sparkpin.smoke import run
from sparkpin.smoke.evidence import evidence_folder, store_evidence

if TYPE_CHECKING:
    from fake_release import FakeSite  # pytest loads it itself, below

pytest_plugins = ["fake_release"]


def smoke(site: FakeSite, *, host: str = "127.0.0.1", fault: str = "") -> Release:
    """The release as its record has it afterwards."""
    release = dataclasses.replace(site.release, env={"FAKE_VLLM": fault} if fault else {})
    write(site.paths.home, release.recipe, Service(address=Address(host=host, port=free_port())))
    Releases(site.paths).save(release)
    serving = service.started(site.paths, site.engine, release, site.checkpoint)
    return store_evidence(site.paths, release, run.run_smoke(site.paths, site.engine, release, serving))


def standing(site: FakeSite) -> list[Served]:
    return [one for one in status(site.engine) if one.home == str(site.paths.home)]


def test_a_server_that_passes_goes_on_and_leaves_the_evidence_of_any_smoke_test(site: FakeSite) -> None:
    release = smoke(site, host="0.0.0.0")
    (there,) = standing(site)
    folder = evidence_folder(site.paths, release)
    record = json.loads((folder / "result.json").read_text())
    container = site.engine.client.containers.get(there.container)
    assert release.smoke_passed and there.ready and not there.address.is_local, "asked with its key"
    assert [check["name"] for check in record["checks"]] == ["start", *release.demands.checks] and record[
        "ready_seconds"
    ] > 0
    assert sorted(file.name for file in folder.iterdir()) == ["exchanges.jsonl", "result.json", "server.log"]
    assert container.logs().startswith((folder / "server.log").read_bytes()), "one server, started once"
    assert record["argv"] == container.attrs["Config"]["Cmd"] and record["mods"] == ["vllm-cpu"]
    exchanges = [json.loads(line) for line in (folder / "exchanges.jsonl").read_text().splitlines()]
    assert (
        exchanges[0]["path"] == "/v1/completions"
        and key_path(site.paths, release.recipe).read_text().strip() not in (folder / "exchanges.jsonl").read_text()
    )


@pytest.mark.parametrize(("fault", "failed"), [("dies", "chat"), ("exit", "start: "), ("without-mods", "mods: ")])
def test_what_is_wrong_with_the_server_is_in_its_record_and_its_log_is_kept(
    site: FakeSite, fault: str, failed: str
) -> None:
    release = smoke(site, fault=fault)
    assert release.smoke_failed and release.smoke_failures[0].startswith(failed), release.smoke_failures
    assert b"version 0.32.0" in (evidence_folder(site.paths, release) / "server.log").read_bytes()
    assert bool(standing(site)) == (fault != "exit")
    stop_unless_current(site.paths, site.engine, release)
    assert not standing(site)


def test_a_server_that_somebody_stops_is_no_fault_of_its_release(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "examine", lambda *_: service.stop(site.paths, site.engine, site.release.recipe))
    monkeypatch.setattr(run.Server, "logs", lambda self: (b"",))
    with pytest.raises(SmokeError):
        smoke(site)
    assert Releases(site.paths).get(site.release.tag).smoke is None
