"""What `invoke doctor` says of a Spark, and of this machine.

No Spark is at hand: its facts are made up here, except for nvidia-smi's row, which is what driver 580.159.04 wrote on
an H200, with the name, capability and [N/A] of a GB10 as its users report them. All rules are run for real; so are
all readers, on this machine.
"""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkout import PROJECT

from sparkpin.build.checkpoint import ModelNeeds
from sparkpin.cli.doctor import command, rules
from sparkpin.cli.doctor import facts as reading
from sparkpin.cli.doctor.facts import MachineFacts
from sparkpin.cli.doctor.rules import MachineFinding, NeededMemory
from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.host import machine, preflight
from sparkpin.host.machine import Host, parse_gpus
from sparkpin.pins import manifests

GIB = 1 << 30
H200 = "NVIDIA H200, 9.0, 580.159.04, 0" + ", Not Active" * 4 + "\n"


def row(busy: str = "0", active: int | None = None) -> str:
    states = ["Active" if number == active else "Not Active" for number in range(4)]
    return ", ".join(["NVIDIA GB10", "12.1", "580.159.04", busy, *states]) + "\n"


SPARK = MachineFacts(
    host=Host(True, "aarch64", "ubuntu 24.04", ("ubuntu", "debian"), False, True, True, 121 * GIB, 112 * GIB),
    gpus=parse_gpus(row()),
    module="580.159.04",
    ways=("the runtime nvidia",),
    docker="29.2.1",
    elsewhere="",
    port=8000,
    holder="",
    kernel="6.17.0-1032-nvidia",
)
NO_SPARK = dataclasses.replace(SPARK.host, is_spark=False)
NEEDS = NeededMemory("recipe qwen, stage v2-tq,", 105 * GIB)


def found(plan: NeededMemory = NEEDS, cuda: str | None = "13.0", **changes: object) -> dict[str, MachineFinding]:
    return {one.name: one for one in rules.findings(dataclasses.replace(SPARK, **changes), plan, cuda)}  # type: ignore[arg-type]


def test_a_spark_that_has_all() -> None:
    names = ("NVIDIA driver", "GPU", "GPU in containers", "memory plan", "port 8000")
    assert {name: one.state for name, one in found().items()} == dict.fromkeys(names, "ok")
    assert all(not one.fix for one in found().values())


@pytest.mark.parametrize(
    ("changes", "name", "seen"),
    [
        ({}, "", ""),
        ({"kernel": "7.0.0-1019-nvidia"}, "kernel-7", "7.0.0-1019-nvidia"),
        ({"gpus": parse_gpus(row().replace("580.159.04", "590.48.01"))}, "driver-590", "590.48.01"),
        ({"gpus": (), "module": "590.48.01"}, "driver-590", "590.48.01"),
        ({"host": dataclasses.replace(SPARK.host, memory_total=60 * GIB)}, "small-spark", "memory 64"),
        ({"elsewhere": "b", "kernel": "7.0.0-1019-nvidia"}, "", ""),
    ],
)
def test_machines_that_are_known_to_break(changes: dict[str, object], name: str, seen: str) -> None:
    facts = dataclasses.replace(SPARK, **changes)  # type: ignore[arg-type]
    told = list(rules.known(facts, manifests.load_known_issues(PROJECT)))
    assert [one.name for one in told] == [name] * bool(name)
    assert all(one.state == "advice" and seen in one.detail and one.fix for one in told)


@pytest.mark.parametrize(
    ("name", "changes", "state"),
    [
        ("NVIDIA driver", {"gpus": (), "module": ""}, "MISSING"),
        ("GPU", {"gpus": ()}, "MISSING"),
        ("GPU", {"gpus": parse_gpus(H200)}, "advice"),
        ("GPU in containers", {"ways": ()}, "MISSING"),
        ("port 8000", {"holder": "the container ollama"}, "advice"),
        ("memory plan", {"plan": dataclasses.replace(NEEDS, needed=130 * GIB)}, "advice"),
        ("memory plan", {"plan": NeededMemory("recipe qwen", None, "no headers yet", "invoke plan")}, "advice"),
    ],
)
def test_each_finding_has_the_command_that_fixes_it(name: str, changes: dict[str, object], state: str) -> None:
    one = found(**changes)[name]  # type: ignore[arg-type]
    needs_no_command = state == "ok" or changes.get("gpus") == parse_gpus(H200)
    assert (one.state, not one.fix) == (state, needs_no_command)


@pytest.mark.parametrize(
    ("driver", "cuda", "state"),
    [
        ("580.65.06", "13.0", "ok"),
        ("580.65.05", "13.0", "MISSING"),
        ("575.57.08", "12.9", "ok"),
        ("575.57.08", "13.1", "MISSING"),
    ],
)
def test_the_driver_against_the_image_s_minimum(driver: str, cuda: str | None, state: str) -> None:
    gpus = tuple(dataclasses.replace(gpu, driver=driver) for gpu in SPARK.gpus)
    assert found(cuda=cuda, gpus=gpus)["NVIDIA driver"].state == state


@pytest.mark.parametrize(
    ("changes", "cuda", "names"),
    [
        ({}, None, ["memory plan", "port 8000"]),
        ({"host": NO_SPARK}, "13.0", ["port 8000"]),
        ({"elsewhere": "spark-2"}, "13.0", ["port 8000"]),
    ],
)
def test_what_serves_elsewhere_or_uses_no_gpu_is_not_asked_for_one(
    changes: dict[str, object], cuda: str | None, names: list[str]
) -> None:
    assert list(found(cuda=cuda, gpus=(), module="", ways=(), **changes)) == names


@pytest.mark.parametrize(("version", "by_cdi"), [("24.0.9", False), ("25.0.1", True)])
def test_what_is_read_of_a_spark(version: str, by_cdi: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "sys/module/nvidia/version": "580.159.04\n",
        "etc/cdi/nvidia.yaml": "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n",
        "etc/cdi/other.yaml": "kind: example.com/nic\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    info = {"ServerVersion": version, "Runtimes": {"runc": {}}}
    engine = SimpleNamespace(client=SimpleNamespace(info=lambda: info), elsewhere="")
    monkeypatch.setattr(reading.Engine, "connect", lambda: engine)
    seen = reading.read_facts(SPARK.host, 1, root=tmp_path, run=lambda argv: {"nvidia-smi": row()}.get(argv[0]))
    assert (seen.gpus, seen.module, seen.docker) == (SPARK.gpus, "580.159.04", version)
    assert ("CDI" in seen.ways) == by_cdi and "the runtime nvidia" not in seen.ways
    info["Runtimes"] = {"nvidia": {}}
    assert "the runtime nvidia" in reading.read_facts(SPARK.host, 1, root=tmp_path).ways


def test_who_has_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert reading.holder_of(None, server.getsockname()[1]) == "a process"
    assert reading.holder_of(None, 1) == ""


def test_the_cuda_release_of_each_stack_is_that_of_its_lock() -> None:
    stacks = [manifests.load_stack(PROJECT, path.stem) for path in (PROJECT / "pins/stacks").glob("*.lock")]
    told = {stack.name: stack.gpu.cuda for stack in stacks if stack.gpu}
    assert told["spark"] == "13.0"
    for stack in stacks:
        wheels = manifests.load_stack_lock(PROJECT, stack).wheels
        runtimes = {wheel.version for wheel in wheels if wheel.name.startswith("nvidia-cuda-runtime")}
        assert {".".join(version.split(".")[:2]) for version in runtimes} == set(filter(None, [told.get(stack.name)]))


def test_a_plan_that_wants_the_network_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.host, "default_stack", lambda _: "cpu")  # so is the machine's, wherever this runs
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    recipe, stack = manifests.load_recipe(PROJECT, "scripted-tiny"), manifests.load_stack(PROJECT, "cpu")
    memory = command.memory_of(paths, recipe, stack)
    assert (memory.needed, memory.fix) == (None, "invoke plan (it fetches them)")
    assert not (tmp_path / "cache").exists()


def test_a_drafter_of_a_hub_is_told_of_a_generated_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    recipe = manifests.load_recipe(PROJECT, "scripted-drafted")
    assert command.model_of(paths, recipe, NEEDS, preflight.Needs(), served=True) == []  # both are generated
    drafter = manifests.load_model(PROJECT, "qwen3.5-122b-dflash")
    joined = manifests.load_model(PROJECT, "scripted-tiny").with_drafter(drafter)
    monkeypatch.setattr(command.manifests, "model_of", lambda *_: joined)
    told, *_ = command.model_of(paths, recipe, NEEDS, preflight.Needs(), served=True)
    assert (told.name, told.state) == ("model", "advice") and told.fix.startswith("invoke up --recipe")


@pytest.mark.parametrize(("free", "served", "states"), [(9, True, ["MISSING"]), (10, True, ["ok"]), (9, False, [])])
def test_a_disk_that_is_too_small_for_a_recipe(free: int, served: bool, states: list[str]) -> None:
    needs, row = ModelNeeds(("a/b",), 4, 6), preflight.DiskRow(((PROJECT, 10 << 30),), free << 30, PROJECT)
    _, *found = rules.model("a-model", "a-recipe", needs, [row], served=served)
    assert [one.state for one in found] == states
    assert all(bool(one.fix) == (one.state == "MISSING") for one in found)


@pytest.mark.parametrize(("free", "state"), [(30, "MISSING"), (1000, "ok")])
def test_the_122b_needs_its_disk_before_its_headers_are_here(
    free: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what other images have of the engine's disk is no room for a model."""
    usage = preflight.shutil.disk_usage("/")._replace(free=free * 10**9)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage)
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    recipe = manifests.load_recipe(PROJECT, "qwen3.5-122b")
    memory = dataclasses.replace(NEEDS, stored=70 * 10**9)
    rows = command.model_of(paths, recipe, memory, preflight.GPU_NEEDS, served=True)
    assert {one.state for one in rows if one.name == "disk in all"} == {state}


def test_a_spark_without_a_driver_gets_the_table_and_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This machine, called a Spark: its other facts are its own, so it lacks what a Spark's driver brings."""
    here = dataclasses.replace(machine.read_host(), is_spark=True)
    monkeypatch.setattr(machine, "read_host", lambda *_: here)
    monkeypatch.setattr(reading, "read_gpus", lambda run: ())
    monkeypatch.setattr(command, "memory_of", lambda *_: NeededMemory("qwen3.5-122b", 97 * GIB))
    with pytest.raises(HostError, match="NVIDIA driver") as caught:
        command.doctor(recipe="qwen3.5-122b")
    assert caught.value.exit_code == 3
    assert "MISSING" in capsys.readouterr().out


def test_what_a_stack_without_a_lock_wants_is_told(tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    stack = manifests.load_stack(PROJECT, "spark").model_copy(update={"name": "never-locked"})
    (told,) = command.lock_of(paths, stack)
    assert (told.name, told.state) == ("lock", "advice") and told.fix.startswith("invoke lock --stack never-locked")
    assert command.lock_of(paths, manifests.load_stack(PROJECT, "spark")) == []
