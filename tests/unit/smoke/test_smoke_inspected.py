"""A release that this machine cannot serve: inspected in place of the smoke test, and never "passed"."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_release import made_checkpoint
from made_releases import release
from places import PROJECT

from sparkpin.cli import smoke as task
from sparkpin.core import files
from sparkpin.core.errors import BusyError, HostError, InputError
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.host.machine import Gpu
from sparkpin.measure import own_server
from sparkpin.pins import manifests
from sparkpin.releases import current, runs_here
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import obstacle_of
from sparkpin.serve import memory_limit, service
from sparkpin.smoke import evidence
from sparkpin.smoke.inspect.facts import ImageFacts, ImageFinding
from sparkpin.smoke.inspect.report import Result
from sparkpin.smoke.inspect.run import inspect, result_of

WHY = "stack spark is for linux/arm64, and this engine's machine is linux/amd64"
GPU = "stack spark is for a GPU of compute capability 12.1; here:"
BROKEN = ImageFinding(
    "error", "torch", "opt/vllm/_C.so", "vLLM is built for CUDA 12, but torch is built without CUDA", "..."
)
GB10, H100 = Gpu("NVIDIA GB10", "12.1", "580.95"), Gpu("NVIDIA H100", "9.0", "580.95")


def examined(*found: ImageFinding, emulated: bool = False) -> Result:
    return Result("sparkpin/tiny:v2", "linux/arm64", 121, ImageFacts(()), found, seconds=4.0, emulated=emulated)


INSPECTED = result_of(examined(), WHY)
EMULATED = result_of(examined(emulated=True), WHY)
FAILED = result_of(examined(BROKEN), WHY)
PASSED: dict[str, Any] = {"passed": True, "seconds": 20.0, "checks": []}
SERVER_FAILED = {"passed": False, "checks": [{"name": "start", "passed": False, "detail": "exited with 1"}]}


@pytest.fixture
def records(tmp_path: Path) -> Releases:
    return Releases(Paths(PROJECT, tmp_path / "cache", tmp_path / "home"))


def kept(records: Releases, *results: dict[str, Any], state: str = "built") -> Release:
    """A release after these smoke tests."""
    records.save(release(1, state))
    for result in results:
        records.smoked(release(1).tag, result)
    return records.get(release(1).tag)


@pytest.mark.parametrize(
    ("stack", "platform", "gpus", "why"),
    [
        ("cpu", "linux/amd64", (), ""),
        ("cpu", "linux/arm64", (), "stack cpu is for linux/amd64, and this engine's machine is linux/arm64"),
        ("spark", "linux/amd64", (GB10,), WHY),
        ("spark", "linux/arm64", (), f"{GPU} none"),
        ("spark", "linux/arm64", (H100,), f"{GPU} NVIDIA H100, 9.0"),
        ("spark", "linux/arm64", (H100, GB10), ""),
    ],
)
def test_what_keeps_a_server_from_running(stack: str, platform: str, gpus: tuple[Gpu, ...], why: str) -> None:
    assert obstacle_of(manifests.load_stack(PROJECT, stack), platform, gpus) == why


def test_each_node_wants_a_gpu_of_its_own_where_the_stack_wants_one() -> None:
    spark, cpu = (manifests.load_stack(PROJECT, name) for name in ("spark", "cpu"))
    told = obstacle_of(spark, "linux/arm64", (GB10, H100), nodes=2)
    assert "2 machines" in told and "has 1" in told and "invoke smoke TAG --nodes" in told
    assert (
        obstacle_of(spark, "linux/arm64", (GB10, GB10), nodes=2) == obstacle_of(cpu, "linux/amd64", (), nodes=2) == ""
    )


SPARK = {"Name": "spark-2", "KernelVersion": "6.11.0", "MemTotal": 128 << 30, "Architecture": "aarch64"}


class EngineOfASpark(http.server.BaseHTTPRequestHandler):
    """What an engine says of its machine; there is no second machine to ask."""

    def do_GET(self) -> None:
        data = json.dumps(SPARK | {"Version": "29.2.1", "ApiVersion": "1.52", "MinAPIVersion": "1.24"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def far_engine() -> Iterator[Engine]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), EngineOfASpark) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Engine.at(f"tcp://127.0.0.1:{server.server_port}")
        server.shutdown()


def test_the_gpus_of_this_machine_are_not_those_of_an_engine_elsewhere(
    records: Releases, far_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_here, "read_gpus", lambda: (GB10,))  # as on a Spark
    spark = dataclasses.replace(release(1), stack="spark")
    assert runs_here.obstacle(records.paths, far_engine, spark) == (
        "the engine runs on spark-2, and a server is given folders of this machine"
    )
    for start in (
        lambda: inspect(records.paths, far_engine, spark),
        lambda: service.start(records.paths, far_engine, spark, made_checkpoint(tmp_path / "checkpoint")),
    ):
        with pytest.raises(HostError, match="the engine runs on spark-2") as caught:
            start()
        assert "unset DOCKER_HOST" in caught.value.next_step


@pytest.mark.parametrize(
    ("results", "state", "text"),
    [
        ([INSPECTED], "inspected", "inspected"),
        ([EMULATED], "inspected", "inspected, emulated"),
        ([FAILED], "failed", "inspection failed: torch"),
        ([FAILED, INSPECTED], "inspected", "inspected"),
        ([SERVER_FAILED, INSPECTED], "inspected", "inspected"),
        ([EMULATED, PASSED], "passed", "passed in 20 s"),
        ([PASSED, FAILED], "passed", "passed in 20 s"),
    ],
)
def test_what_the_record_and_the_tables_say(records: Releases, results: list[Any], state: str, text: str) -> None:
    made = kept(records, *results)
    assert (made.state, made.smoke_text) == (state, text)
    assert made.is_good == made.smoke_passed == (state == "passed")
    assert made == records.get(made.tag), "the record can be read again"


def test_what_was_only_inspected_is_not_promoted(records: Releases) -> None:
    made = kept(records, EMULATED)
    with pytest.raises(InputError) as caught:
        current.promote(records.paths, Any, made)  # type: ignore[arg-type]  # no engine is asked
    assert f"invoke smoke {made.tag}" in caught.value.next_step


def test_a_current_release_that_is_inspected_meanwhile_stays_good(records: Releases) -> None:
    made = kept(records, state="passed")
    records.point(made)
    records.smoked(made.tag, FAILED)
    records.save(release(2, "passed"))
    records.point(release(2))
    assert [one.state for one in records.of_recipe("tiny")] == ["retired", "current"]


def test_record_and_evidence_are_of_one_test(records: Releases) -> None:
    """An inspection that ends after another run's server has passed leaves neither; both are written under one lock."""
    records.save(release(1))

    def keep(result: Any, text: str) -> Release:
        class Locked(evidence.Evidence):
            def write(self, folder: Path) -> None:
                with pytest.raises(BusyError), files.lock(records.root / "tiny/.lock", wait=False):
                    pass
                super().write(folder)

        return evidence.store_evidence(records.paths, release(1), Locked(result, {"result.json": text.encode()}))

    folder = evidence.evidence_folder(records.paths, release(1))
    (folder.parent / ".partial-of-a-killed-test/smoke").mkdir(parents=True)
    for result, text, state, stays in (
        (INSPECTED, "inspected", "inspected", "inspected"),
        (PASSED, "passed", "passed", "passed"),
        (FAILED, "inspected again", "passed", "passed"),
        (SERVER_FAILED, "server failed", "failed", "server failed"),
    ):
        assert keep(result, text).state == records.get(release(1).tag).state == state
        assert [(file.name, file.read_text()) for file in folder.iterdir()] == [("result.json", stays)]
    assert [file.name for file in folder.parent.iterdir()] == ["smoke"]
    for result, text in ((SERVER_FAILED, "failed again"), (PASSED, "passed"), (PASSED, "passed again")):
        keep(result, text)
    left = {path.parent.name: path.read_text() for path in folder.parent.glob("*/result.json")}
    assert left == {"smoke": "passed again", evidence.FAILED: "failed again"}, "of those that failed the last one"


@pytest.mark.parametrize(
    ("result", "runs_here", "owed"),
    [
        (None, False, True),
        (INSPECTED, False, False),
        (INSPECTED, True, True),
        (PASSED, True, False),
        (SERVER_FAILED, True, False),
    ],
)
def test_which_releases_wait_for_a_smoke_test(
    records: Releases, monkeypatch: pytest.MonkeyPatch, result: Any, runs_here: bool, owed: bool
) -> None:
    made = kept(records, *([result] if result else []))
    monkeypatch.setattr(evidence, "obstacle", lambda *_: "" if runs_here else WHY)
    engine: Any = None  # the machine is a fault that cannot be made otherwise
    assert evidence.owes(records.paths, engine, made) == owed


@pytest.mark.parametrize("gpus", [True, False])
def test_without_memory_no_server_is_started_and_the_release_is_not_at_fault(
    records: Releases, monkeypatch: pytest.MonkeyPatch, gpus: bool
) -> None:
    """As beside a served model: vLLM would refuse to start, and a good release be recorded as failed."""
    made = kept(records)
    plan: Any = SimpleNamespace(needed=10 << 30, hints=())
    room = memory_limit.Room(10 << 30, plan, compilers=1 if gpus else None)
    for name, given in {"engine_of": None, "obstacle": "", "checkpoint_of": records.root}.items():
        for module in (task, own_server):
            monkeypatch.setattr(module, name, lambda *_, given=given, **__: given, raising=module is task)
    monkeypatch.setattr(task, "require_consistent", lambda *_: None)
    monkeypatch.setattr(own_server, "exclusive_run", lambda *_: contextlib.nullcontext())
    for name, told in {"drop_page_cache": None, "available": 1 << 30, "room_for": room}.items():
        monkeypatch.setattr(memory_limit, name, lambda *_, told=told: told)
    with pytest.raises(HostError):
        task.smoke_releases(records.paths, (made,))
    assert records.get(made.tag).smoke is None
