"""What a service needs besides its server: a key, memory, a unit of systemd."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from heard import heard
from made_releases import release
from memory_samples import SPARK, plan_122b

from sparkpin.core.errors import EngineError, HostError, InputError, ManifestError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.memory.plan import Machine, MemoryPlan
from sparkpin.releases import container as running
from sparkpin.releases.record import Release
from sparkpin.serve import memory_limit, service, switching, unit
from sparkpin.serve.address import UNCHANGED, Address, AddressOptions, key_of, key_path
from sparkpin.serve.launch import LaunchOrder
from sparkpin.serve.memory_limit import COMPILER, GPU_PROCESSES
from sparkpin.serve.served import Service, read, write
from sparkpin.serve.switching import Switch


def test_a_key_that_others_can_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    paths, everywhere = Paths(tmp_path, tmp_path / "cache", tmp_path / "home"), Address(host="0.0.0.0")
    key = key_of(paths, "r", everywhere)
    assert key == key_of(paths, "r", everywhere) and key_of(paths, "r", Address(host="::1")) is None
    file = key_path(paths, "r")
    file.chmod(0o640)
    with pytest.raises(InputError, match="mode 640 lets others read"):
        key_of(paths, "r", everywhere)
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(InputError, match="at least 16"):
        key_of(paths, "r", everywhere)


def test_the_page_cache_is_dropped_where_that_is_allowed(tmp_path: Path) -> None:
    said = heard()
    memory_limit.drop_page_cache(tmp_path / "drop_caches")
    assert (tmp_path / "drop_caches").read_text() == "1\n"
    memory_limit.drop_page_cache(tmp_path / "absent/drop_caches")
    assert "sudo sh -c 'echo 1 > /proc/sys/vm/drop_caches'" in said[-1]


@pytest.mark.parametrize("system", [True, False])
def test_systemd_takes_the_unit(tmp_path: Path, system: bool) -> None:
    program = tmp_path / "in voke"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = unit.unit_text(
        recipe="r",
        invoke=program,
        project=tmp_path,
        env={"SPARKPIN_HOME": "/a b/100%"},
        system=system,
        machines=("ssh://b:1",),
    )
    assert ("Requires=docker.service" in text) == system
    assert 'Environment="SPARKPIN_HOME=/a b/100%%"' in text
    text = text.replace("Requires=docker.service\n", "").replace(" docker.service", "")  # a machine of CI has none
    file = tmp_path / unit.name_of("r")
    file.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True)
    assert done.returncode == 0 and str(file.name) not in done.stderr, done.stderr


def test_a_machine_s_plan_is_of_its_own_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of another machine as large as this one: what is free there is not this one's. The limit is for processes."""
    seen: list[Machine] = []

    def plan_of(_: Paths, __: Release, machine: Machine) -> MemoryPlan:
        seen.append(machine)
        return plan_122b("--gpu-memory-utilization 0.9 --max-num-seqs 16", machine)

    monkeypatch.setattr(memory_limit, "plan_of", plan_of)
    engine: Any = SimpleNamespace(info={"MemTotal": SPARK.total, "NCPU": 20})
    monkeypatch.setattr(running, "folder_size", lambda _: 66 << 30)
    room = memory_limit.room_for(Paths(tmp_path, tmp_path, tmp_path), engine, release(1), tmp_path, free=100 << 30)
    assert [(one.total, one.free) for one in seen] == [(SPARK.total, 100 << 30)]
    assert room.plan is not None and room.limit < room.plan.needed


@pytest.mark.parametrize(("memory", "weights", "jobs"), [(24, 0, 1), (121, 66, 4), (121, 0, 12), (1000, 0, 20)])
def test_compilers_take_no_more_than_the_machine_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: int, weights: int, jobs: int
) -> None:
    """8 GiB each, beside 16 GiB and the weights; one at least, and one a core at most. Without a plan, too: the limit
    holds them, and MAX_JOBS has their number unless the release has one."""

    def plan_of(*_: Any) -> MemoryPlan:
        raise ManifestError("r.yaml", "layer_types", "sliding_attention", "full_attention")

    monkeypatch.setattr(memory_limit, "plan_of", plan_of)
    monkeypatch.setattr(running, "folder_size", lambda _: weights << 30)
    monkeypatch.setattr(running, "cache_volume", lambda *_: "cache")
    engine: Any = SimpleNamespace(info={"MemTotal": memory << 30, "NCPU": 20})
    for gpus, compilers in ((False, None), (True, jobs)):
        monkeypatch.setattr(memory_limit, "uses_gpu", lambda *_, gpus=gpus: gpus)
        room = memory_limit.room_for(Paths(tmp_path, tmp_path, tmp_path), engine, release(1), tmp_path)
        assert room.compilers == compilers and room.why and room.limit < memory << 30
        own = dataclasses.replace(release(1), env={"MAX_JOBS": "99"})
        for one, wanted in ((release(1), compilers and str(compilers)), (own, "99")):
            made = running.server_settings(engine, one, "v", "/s", None, room.compilers, memory=1, gpus=gpus)
            assert made["environment"].get("MAX_JOBS") == wanted
    if memory > 24:
        assert room.limit >= GPU_PROCESSES + jobs * COMPILER


def test_what_needs_more_than_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_122b("--gpu-memory-utilization 0.9 --max-num-seqs 16", dataclasses.replace(SPARK, free=80 << 30))
    monkeypatch.setattr(memory_limit, "available", lambda: plan.needed)
    memory_limit.require_room(memory_limit.Room(1, plan), release(1))
    monkeypatch.setattr(memory_limit, "available", lambda: 80 << 30)
    with pytest.raises(
        HostError, match=r"needs .* GiB, and 80.00 GiB are free\n  next: .*--gpu-memory-utilization 0\."
    ):
        memory_limit.require_room(memory_limit.Room(1, plan), release(1))


def test_what_is_tested_has_the_limits_of_what_is_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    room, engine = memory_limit.Room(7 << 30, None, compilers=3), cast(Any, None)
    for name, value in {"room_for": room, "drop_page_cache": None}.items():
        monkeypatch.setattr(memory_limit, name, lambda *_, value=value: value)
    place = memory_limit.place_for(Paths(tmp_path, tmp_path, tmp_path), engine, release(1), tmp_path)
    assert (place.memory, place.compilers) == (room.limit, 3)


@pytest.mark.parametrize("compilers", [None, 1])
def test_what_has_no_room_is_not_started_and_the_former_one_answers_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compilers: int | None
) -> None:
    """With a GPU and without."""
    back = list[Switch]()
    for name in ("note", "bring_proxy", "end_old", "create"):
        monkeypatch.setattr(Switch, name, lambda *_: None)
    monkeypatch.setattr(Switch, "go_back", lambda self: back.append(self))
    monkeypatch.setattr(switching.proxies, "shut", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(switching.linked, "start", lambda _: pytest.fail("started"))
    for name, value in {"available": 1 << 30, "drop_page_cache": None}.items():
        monkeypatch.setattr(memory_limit, name, lambda *_, value=value: value)
    room = memory_limit.Room(1, cast(Any, SimpleNamespace(needed=2 << 30, hints=())), compilers=compilers)
    wanted, engine = Service(orders=(launch_order(tmp_path),)), cast(Any, None)
    switch = Switch(Paths(tmp_path, tmp_path, tmp_path), engine, "r", wanted, Service(), {}, (), False, room, 0)
    with pytest.raises(HostError):
        switch.carry_out()
    assert back == [switch]


def test_when_it_answered_last_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a server that runs already, whose earlier deaths are no news then."""
    for name, value in {"bring_proxy": None, "await_ready": True, "look": None}.items():
        monkeypatch.setattr(Switch, name, lambda *_, value=value: value)
    paths, engine, parts = Paths(tmp_path, tmp_path, tmp_path), cast(Any, None), cast(Any, [None])
    monkeypatch.setattr(switching.linked, "keep_up", lambda *_: None)
    known = Service(orders=(launch_order(tmp_path),))
    write(tmp_path, "r", known)
    before = time.time()
    Switch(paths, engine, "r", known, known, {}, parts, True, None, 0).carry_out()
    assert read(tmp_path, "r").answered >= before


def test_why_a_start_failed_is_told_where_going_back_fails_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(error: Exception) -> Any:
        def fail(_: Switch, *__: object) -> None:
            raise error

        return fail

    monkeypatch.setattr(Switch, "note", fails(SmokeError("no such architecture", next_step="")))
    monkeypatch.setattr(Switch, "go_back", fails(EngineError("no answer")))
    paths, engine, order = Paths(tmp_path, tmp_path, tmp_path), None, SimpleNamespace()
    wanted = Service.model_construct(orders=(order,))
    switch = Switch(paths, engine, "r", wanted, wanted, {}, (), False, None, 0)  # type: ignore[arg-type]
    said = heard()
    with pytest.raises(SmokeError, match="no such architecture"):
        switch.carry_out()
    assert "no answer" in said[-1]


def test_what_was_stopped_after_serve_read_its_record_does_not_come_back(tmp_path: Path) -> None:
    paths, engine, order = Paths(tmp_path, tmp_path, tmp_path), None, launch_order(tmp_path)
    wanted, stopped = Service(orders=(order,)), Service(address=Address(port=8001))
    write(tmp_path, "r", stopped)
    switch = Switch(paths, engine, "r", wanted, wanted, {}, (), False, None, 0)  # type: ignore[arg-type]
    with pytest.raises(SmokeError, match="stopped"):
        switch.carry_out()
    assert read(tmp_path, "r") == stopped


def launch_order(checkpoint: Path) -> LaunchOrder:
    return LaunchOrder(release(1), checkpoint, memory=None, gpus=False, labels={}, timeout=1, restarts=1)


@pytest.mark.parametrize(
    ("host", "cert", "warned"), [("127.0.0.1", "", False), ("0.0.0.0", "", True), ("0.0.0.0", "c", False)]
)
def test_a_key_in_the_clear_is_told_at_each_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, cert: str, warned: bool
) -> None:
    for name in ("read_tls", "require_free", "find"):
        monkeypatch.setattr(service, name, lambda *_: None)
    said, record = heard(), Service(address=Address(host=host, cert=cert))
    for known, options in ((Service(), AddressOptions(host=host)), (record, UNCHANGED)):
        engine: Any = None
        if cert and options != UNCHANGED:
            options = AddressOptions(host=host, tls_cert=cert, tls_key="k")
        service.new_address(Paths(tmp_path, tmp_path, tmp_path), engine, release(1), options, known, is_there=False)
        assert any("--tls-cert" in line for line in said) == warned
        said.clear()
