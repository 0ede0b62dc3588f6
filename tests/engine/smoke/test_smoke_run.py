"""The smoke test with a real engine: a container that is closed in, evidence that is whole, faults that are results."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import time
from pathlib import Path

import pytest

from sparkpin.core.errors import CheckpointError, EngineError, IntegrityError
from sparkpin.core.files import lock
from sparkpin.core.paths import Paths
from sparkpin.core.tags import tag_of
from sparkpin.host.engine import Engine
from sparkpin.host.fingerprint import read_fingerprint
from sparkpin.pins.vllm_command import set_flag
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke import server
from sparkpin.smoke.evidence import evidence_folder, replaced
from sparkpin.smoke.run import SmokeResult, run_smoke

pytest_plugins = ["fake_release"]
CHECKS = ["completion", "chat", "chat-stream", "tool-call", "tool-call-stream", "tool-answer", "long-text"]
CHECKS += ["chat-sampled", "mods"]


def faulty(release: Release, fault: str) -> Release:
    return dataclasses.replace(release, env={"FAKE_VLLM": fault})


def smoke(paths: Paths, fake_engine: Engine, release: Release, checkpoint: Path) -> tuple[SmokeResult, list[str]]:
    said: list[str] = []
    result, write = run_smoke(paths, fake_engine, release, checkpoint, said.append)
    with replaced(evidence_folder(paths, release)) as folder:
        write(folder)
    left = fake_engine.client.containers.list(all=True, filters={"label": f"{server.LABEL}={server.owner(paths)}"})
    assert not left and not list(paths.work.glob(f"{server.prefix(paths)}*"))
    return result, said


def test_a_server_that_answers_passes_and_leaves_evidence(
    paths: Paths, fake_engine: Engine, release: Release, checkpoint: Path
) -> None:
    result, said = smoke(paths, fake_engine, release, checkpoint)
    assert result.passed, result
    assert [check.name for check in result.checks] == ["start", *CHECKS]
    assert result.mods == ("vllm-cpu",) and result.acceptance == 1.0 and result.ready_seconds is not None
    assert "vLLM 0.32.0 reads its configuration" in said and "answering" in said
    assert any(line.startswith("chat: ok, 24 tokens, exact") for line in said)
    folder = evidence_folder(paths, release)
    assert sorted(file.name for file in folder.iterdir()) == ["exchanges.jsonl", "result.json", "server.log"]
    exchanges = [json.loads(line) for line in (folder / "exchanges.jsonl").read_text().splitlines()]
    assert [exchange["path"] for exchange in exchanges][:2] == ["/v1/completions", "/v1/chat/completions"]
    assert exchanges[2]["response"].endswith("data: [DONE]\n\n")
    record = json.loads((folder / "result.json").read_text())
    assert record["passed"] and record["release"] == release.tag and record["image"] == release.image
    assert "--uds" in record["argv"] and "--port" not in record["argv"]
    assert record["host"] == read_fingerprint(fake_engine.version).model_dump(mode="json")
    assert result.log_path.read_bytes().startswith(b"version 0.32.0\n")
    json.dumps(result.as_dict())
    assert (
        (record["load_format"], record["weights_seconds"])
        == ("auto", 0.25)
        == (
            result.load_format,
            result.weights_seconds,
        )
    )


def test_each_draft_length_has_a_server_and_evidence_of_its_own(
    paths: Paths, fake_engine: Engine, release: Release, checkpoint: Path
) -> None:
    argv = (*release.argv, "--speculative-config", '{"method":"mtp","num_speculative_tokens":2}')
    wanted = {"checks": ("chat", "mods", "acceptance"), "acceptance_floor": 0.8, "draft_lengths": (2, 0)}
    demands = release.demands.model_copy(update=wanted)
    result, _ = smoke(paths, fake_engine, dataclasses.replace(release, argv=argv, demands=demands), checkpoint)
    assert result.passed, result
    told = ["start", "chat", "mods", "acceptance", "start@0", "chat@0", "mods@0"]
    assert [check.name for check in result.checks] == told
    folder = evidence_folder(paths, release)
    logs = {file.name: b"num_speculative_tokens" in file.read_bytes() for file in folder.glob("*.log")}
    assert logs == {"server.log": True, "server-drafts-0.log": False}
    assert [len((folder / f"exchanges{name}.jsonl").read_text().splitlines()) for name in ("", "-drafts-0")] == [3, 2]
    dying = dataclasses.replace(release, argv=argv, demands=demands, env={"FAKE_VLLM": "exit"})
    result, _ = smoke(paths, fake_engine, dying, checkpoint)
    assert [check.name for check in result.checks] == ["start"], "what does not start is not tried with other lengths"


def test_the_container_is_closed_in(paths: Paths, fake_engine: Engine, release: Release, checkpoint: Path) -> None:
    result, _ = smoke(paths, fake_engine, release, checkpoint)
    lines = result.log_path.read_text().splitlines()
    assert "uid 10001" in lines
    facts = json.loads(next(line for line in lines if line.startswith("facts ")).removeprefix("facts "))
    assert facts == {
        "model_readable": True,
        "model_writable": False,
        "root_writable": False,
        "tmp_writable": True,
        "home_writable": True,
        "capabilities": False,
        "new_privileges": False,
        "network": False,
    }


def test_a_server_that_ends_is_told_at_once_with_its_last_words(
    paths: Paths, fake_engine: Engine, release: Release, checkpoint: Path
) -> None:
    result, _ = smoke(paths, fake_engine, faulty(release, "exit"), checkpoint)
    assert not result.passed and result.ready_seconds is None
    (start,) = result.checks
    assert start.name == "start" and "the container exited with 1" in start.detail
    assert (
        "RuntimeError: no such architecture" in start.detail and result.log_path.read_text().count("RuntimeError") == 1
    )


def test_a_server_that_wants_too_much_memory_is_ended(
    paths: Paths, fake_engine: Engine, release: Release, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.running, "memory_limit", lambda *_: 256 << 20)
    result, _ = smoke(paths, fake_engine, faulty(release, "memory"), checkpoint)
    assert "exited with 137, killed for want of memory" in result.checks[0].detail


def test_a_server_that_never_answers_is_given_up(
    paths: Paths, fake_engine: Engine, release: Release, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.running, "ready_timeout", lambda _: 2.0)
    result, _ = smoke(paths, fake_engine, faulty(release, "silent"), checkpoint)
    assert not result.passed and "not ready within 2 s" in result.checks[0].detail


def test_health_alone_proves_nothing(paths: Paths, fake_engine: Engine, release: Release, checkpoint: Path) -> None:
    result, _ = smoke(paths, fake_engine, faulty(release, "completions-500"), checkpoint)
    passed = {check.name: check.passed for check in result.checks}
    assert not result.passed and passed["start"] and not passed["completion"] and not passed["tool-call-stream"]
    assert "EngineCore died" in result.checks[1].detail


def test_a_server_that_dies_between_two_requests(
    paths: Paths, fake_engine: Engine, release: Release, checkpoint: Path
) -> None:
    result, _ = smoke(paths, fake_engine, faulty(release, "dies"), checkpoint)
    details = {check.name: check.detail for check in result.checks if not check.passed}
    assert list(details) == ["chat", *CHECKS[2:]]
    assert details["chat"].endswith("; the container exited with 3")
    assert details["tool-call"] == "not asked: the container exited with 3"


def test_a_later_test_replaces_the_evidence(
    paths: Paths, fake_engine: Engine, release: Release, checkpoint: Path
) -> None:
    smoke(paths, fake_engine, faulty(release, "exit"), checkpoint)
    (evidence_folder(paths, release) / "old").write_text("")
    result, _ = smoke(paths, fake_engine, release, checkpoint)
    folder = evidence_folder(paths, release)
    assert result.passed and not (folder / "old").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["smoke"]


def test_the_record_takes_the_result(paths: Paths, fake_engine: Engine, release: Release, checkpoint: Path) -> None:
    records = Releases(paths)
    records.save(release)
    result, _ = smoke(paths, fake_engine, release, checkpoint)
    assert records.smoked(release.tag, result).state == "passed"
    result, _ = smoke(paths, fake_engine, faulty(release, "exit"), checkpoint)
    failed = records.smoked(release.tag, result)
    assert failed.state == "failed" and "exited with 1" in failed.smoke_failures[0]


def test_what_a_killed_run_left_is_removed(
    paths: Paths, fake_engine: Engine, release: Release, checkpoint: Path
) -> None:
    mine = fake_engine.client.containers.create(
        release.tag, entrypoint=["vllm"], labels={server.LABEL: server.owner(paths)}
    )
    other = fake_engine.client.containers.create(
        release.tag, entrypoint=["vllm"], labels={server.LABEL: "another home"}
    )
    theirs, left = (paths.work / f"smoke-{whose}-x" for whose in ("another", server.owner(paths)[:8]))
    for folder in (theirs, left):  # homes may share a cache
        folder.mkdir(parents=True)
    try:
        _, said = smoke(paths, fake_engine, release, checkpoint)
        assert f"removing {mine.name}, left by a smoke test that was killed" in said
        other.reload()
        assert theirs.is_dir() and not left.exists()
    finally:
        theirs.rmdir()
        other.remove(force=True)


def test_a_run_that_is_killed_leaves_nothing_that_stays(
    paths: Paths, fake_engine: Engine, release: Release, checkpoint: Path
) -> None:
    child = multiprocessing.get_context("fork").Process(
        target=run_smoke, args=(paths, Engine.connect(), faulty(release, "silent"), checkpoint, len)
    )
    child.start()
    mine = {"label": f"{server.LABEL}={server.owner(paths)}"}
    while child.is_alive() and not fake_engine.client.containers.list(filters=mine):
        time.sleep(0.05)
    child.kill()
    child.join()
    assert len(fake_engine.client.containers.list(filters=mine)) == 1
    assert not evidence_folder(paths, release).exists()
    result, said = smoke(paths, fake_engine, release, checkpoint)
    assert result.passed and "left by a smoke test that was killed" in said[0]


def test_an_engine_or_a_release_that_cannot_be_used_is_an_error(
    paths: Paths, fake_engine: Engine, release: Release, checkpoint: Path
) -> None:
    gone = dataclasses.replace(release, tag=tag_of("fake", "base", "0" * 64))
    with pytest.raises(EngineError, match=r"has no image[\s\S]*invoke rebuild sparkpin"):
        run_smoke(paths, fake_engine, gone, checkpoint, print)
    with pytest.raises(IntegrityError, match="names another image"):
        run_smoke(paths, fake_engine, dataclasses.replace(release, image="sha256:" + "0" * 64), checkpoint, print)
    (checkpoint / "config.json").chmod(0o600)
    with pytest.raises(CheckpointError, match=r"config.json: mode 600[\s\S]*chmod -R a\+rX"):
        run_smoke(paths, fake_engine, release, checkpoint, print)


def test_the_command_listens_on_the_socket_only(release: Release) -> None:
    argv = server.socket_argv(dataclasses.replace(release, argv=tuple(set_flag(release.argv, "--uds", "/elsewhere"))))
    assert argv == [
        "vllm",
        "serve",
        "/model",
        "--served-model-name",
        "scripted-tiny",
        "--uds",
        "/run/sparkpin/vllm.sock",
    ]


def test_what_a_killed_smoke_test_left_is_cleared_unless_one_runs(
    fake_engine: Engine, release: Release, paths: Paths
) -> None:
    def leftovers() -> list[object]:
        return fake_engine.client.containers.list(all=True, filters={"label": f"{server.LABEL}={server.owner(paths)}"})

    fake_engine.client.containers.create(release.tag, ["sleep"], labels={server.LABEL: server.owner(paths)})
    with lock(server.smoke_lock(paths)):
        server.clear_leftovers(paths, fake_engine, print)
        assert len(leftovers()) == 1
    server.clear_leftovers(paths, fake_engine, print)
    assert leftovers() == []
