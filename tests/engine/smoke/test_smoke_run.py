"""The smoke test with a real engine: a container that is closed in, evidence that is whole, faults that are results."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import time
from typing import TYPE_CHECKING, Any

import pytest
from docker.models.containers import Container
from heard import heard

from sparkpin.host.engine import Engine
from sparkpin.host.fingerprint import read_fingerprint
from sparkpin.releases.record import Release, Releases
from sparkpin.serve.proxy import before
from sparkpin.smoke import server
from sparkpin.smoke.evidence import Evidence, evidence_folder, replaced
from sparkpin.smoke.run import run_smoke
from sparkpin.smoke.server import Place, exclusive_run, own_server

if TYPE_CHECKING:
    from fake_release import FakeSite  # pytest loads it itself, below

pytest_plugins = ["fake_release"]
CHECKS = ["completion", "chat", "chat-stream", "tool-call", "tool-call-stream", "tool-answer", "long-text"]
CHECKS += ["chat-sampled", "mods"]


def smoke(
    site: FakeSite, release: Release | None = None, memory: int | None = None
) -> tuple[dict[str, Any], list[str]]:
    said = heard()
    evidence = served_alone(site, release or site.release, memory)
    with replaced(evidence_folder(site.paths, site.release)) as folder:
        evidence.write(folder)
    assert not left_over(site) and not list(site.paths.work.glob(f"{server.prefix(site.paths)}*"))
    return evidence.result, said


def served_alone(site: FakeSite, release: Release, memory: int | None = None) -> Evidence:
    serving = own_server(site.paths, release, [Place(site.engine, site.checkpoint, memory)])
    with exclusive_run(site.paths, site.engine):
        return run_smoke(site.paths, site.engine, release, before(site.paths, serving))


def left_over(site: FakeSite, **wanted: bool) -> list[Container]:
    """Containers of smoke tests of this home."""
    mine = {"label": f"{server.LABEL}={server.owner(site.paths)}"}
    return list(site.engine.client.containers.list(filters=mine, **({"all": True} | wanted)))


def test_a_server_that_answers_passes_and_leaves_evidence(site: FakeSite) -> None:
    result, said = smoke(site)
    assert result["passed"], result
    assert [check["name"] for check in result["checks"]] == ["start", *CHECKS]
    assert result["mods"] == ["vllm-cpu"] and result["acceptance"] == 1.0 and result["ready_seconds"] is not None
    assert "vLLM 0.32.0 reads its configuration" in said and "answering" in said
    assert any(line.startswith("chat: ok, 24 tokens, exact") for line in said)
    folder = evidence_folder(site.paths, site.release)
    assert sorted(file.name for file in folder.iterdir()) == ["exchanges.jsonl", "result.json", "server.log"]
    exchanges = [json.loads(line) for line in (folder / "exchanges.jsonl").read_text().splitlines()]
    assert [exchange["path"] for exchange in exchanges][:2] == ["/v1/completions", "/v1/chat/completions"]
    assert exchanges[2]["response"].endswith("data: [DONE]\n\n")
    record = json.loads((folder / "result.json").read_text())
    assert record["passed"] and record["release"] == site.release.tag and record["image"] == site.release.image
    assert "--uds" in record["argv"] and "--port" not in record["argv"]
    assert record["host"] == read_fingerprint(site.engine.version).model_dump(mode="json")
    assert b"\nversion 0.32.0\n" in (folder / "server.log").read_bytes()
    lines = (folder / "server.log").read_text().splitlines()
    assert "uid 10001" in lines
    facts = json.loads(next(line for line in lines if line.startswith("facts ")).removeprefix("facts "))
    allowed = {"model_readable", "tmp_writable", "home_writable"}
    assert {name for name, may in facts.items() if may} == allowed and len(facts) == 8, "it is closed in"


def test_a_server_that_wants_too_much_memory_is_ended(site: FakeSite) -> None:
    result, _ = smoke(site, site.faulty("memory"), 256 << 20)
    assert "exited with 137, killed because memory ran out" in result["checks"][0]["detail"]


def test_a_server_that_never_answers_is_given_up(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.running, "ready_timeout", lambda _: 2.0)
    result, _ = smoke(site, site.faulty("silent"))
    assert not result["passed"] and result["ready_seconds"] is None and " 2 s" in result["checks"][0]["detail"]


def test_the_record_takes_the_result_and_a_later_test_replaces_the_evidence(site: FakeSite) -> None:
    records = Releases(site.paths)
    records.save(site.release)
    result, _ = smoke(site, site.faulty("exit"))
    failed = records.smoked(site.release.tag, result)
    assert failed.state == "failed" and "exited with 1" in failed.smoke_failures[0]
    assert "first error: RuntimeError: no such architecture" in failed.smoke_failures[0]
    (evidence_folder(site.paths, site.release) / "old").write_text("")
    result, _ = smoke(site)
    folder = evidence_folder(site.paths, site.release)
    assert records.smoked(site.release.tag, result).state == "passed" and not (folder / "old").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["smoke"]


def test_a_run_that_is_killed_leaves_nothing_that_stays(site: FakeSite) -> None:
    child = multiprocessing.get_context("fork").Process(
        target=served_alone, args=(dataclasses.replace(site, engine=Engine.connect()), site.faulty("silent"))
    )
    child.start()
    while child.is_alive() and not left_over(site, all=False):
        time.sleep(0.05)
    child.kill()
    child.join()
    assert len(left_over(site, all=False)) == 1
    assert not evidence_folder(site.paths, site.release).exists()
    result, said = smoke(site)
    assert result["passed"] and "left by a smoke test that was killed" in said[0]
