"""What a service needs besides its server: a key, memory, a unit of systemd."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from heard import heard
from memory_samples import SPARK, plan_122b

from sparkpin.core.errors import EngineError, HostError, InputError, ManifestError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.memory.plan import Machine, MemoryPlan
from sparkpin.releases.container import COMPILER, compiler_jobs
from sparkpin.releases.record import Release
from sparkpin.serve import keys, memory_limit, unit
from sparkpin.serve.served import Service
from sparkpin.serve.switching import Switch


def test_a_key_that_others_can_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    paths = Paths(tmp_path, tmp_path / "cache", tmp_path / "home")
    key = keys.key_for(paths, "r", "0.0.0.0")
    assert key == keys.key_for(paths, "r", "0.0.0.0") and keys.key_for(paths, "r", "127.0.0.1") is None
    file = keys.path_of(paths, "r")
    file.chmod(0o640)
    with pytest.raises(InputError, match="mode 640 lets others read"):
        keys.key_for(paths, "r", "0.0.0.0")
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(InputError, match="at least 16"):
        keys.key_for(paths, "r", "0.0.0.0")


def test_the_page_cache_is_dropped_where_that_is_allowed(tmp_path: Path) -> None:
    said = heard()
    assert memory_limit.drop_page_cache(tmp_path / "drop_caches")
    assert (tmp_path / "drop_caches").read_text() == "1\n"
    assert not memory_limit.drop_page_cache(tmp_path / "absent/drop_caches")
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
    release: Any = None
    room = memory_limit.room_for(Paths(tmp_path, tmp_path, tmp_path), engine, release, tmp_path, free=100 << 30)
    assert [(one.total, one.free) for one in seen] == [(SPARK.total, 100 << 30)]
    assert room.plan is not None and room.limit < room.plan.needed


def test_without_a_plan_the_limit_holds_the_compilers_of_a_first_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """MAX_JOBS counts on it, whatever the weights are."""

    def plan_of(*_: Any) -> MemoryPlan:
        raise ManifestError("r.yaml", "layer_types", "sliding_attention", "full_attention")

    monkeypatch.setattr(memory_limit, "plan_of", plan_of)
    engine: Any = SimpleNamespace(info={"MemTotal": SPARK.total, "NCPU": 20})
    release: Any = None
    limits = list[int]()
    for gpus in (False, True):
        monkeypatch.setattr(memory_limit, "uses_gpu", lambda *_, gpus=gpus: gpus)
        limits.append(memory_limit.room_for(Paths(tmp_path, tmp_path, tmp_path), engine, release, tmp_path).limit)
    compilers = compiler_jobs(SPARK.total, 20) * COMPILER
    assert limits[0] < compilers < limits[1]


def test_what_needs_more_than_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_122b("--gpu-memory-utilization 0.9 --max-num-seqs 16", dataclasses.replace(SPARK, free=80 << 30))
    release: Any = SimpleNamespace(tag="sparkpin/r:base-1")
    monkeypatch.setattr(memory_limit, "available", lambda: plan.needed)
    memory_limit.require_room(memory_limit.Room(1, plan), release)
    monkeypatch.setattr(memory_limit, "available", lambda: 80 << 30)
    with pytest.raises(
        HostError, match=r"needs .* GiB, and 80.00 GiB are free\n  next: .*--gpu-memory-utilization 0\."
    ):
        memory_limit.require_room(memory_limit.Room(1, plan), release)


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
