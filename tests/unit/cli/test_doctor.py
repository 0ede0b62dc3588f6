"""What `invoke doctor` prints of a recipe, on a Spark and on this machine. tests/unit/host has the rest of its rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkout import PROJECT

from sparkpin.cli import machine as task
from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.host import machine, preflight
from sparkpin.host.machine import Host, Requirement
from sparkpin.pins import manifests

GIB = 1 << 30
SPARK = Host(True, "aarch64", "ubuntu 24.04", ("ubuntu", "debian"), False, 121 * GIB, 112 * GIB)
HERE = dataclasses.replace(machine.read_host(), is_spark=False)
PLAN = SimpleNamespace(weights=[SimpleNamespace(stored=70 * 10**9)])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds is made up: a plan, and what lies in the engine's folder."""
    monkeypatch.setattr(task.planning, "plan_recipe", lambda *_: PLAN)
    monkeypatch.setattr(preflight, "size_of", lambda *_: 0)


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(PROJECT, tmp_path / "cache", tmp_path / "home")


def rows(
    paths: Paths, host: Host, recipe: str, *, is_asked: bool = True, elsewhere: str = ""
) -> dict[str, Requirement]:
    chosen = manifests.load_recipe(PROJECT, recipe)
    return {one.name: one for one in task.rows_of_recipe(paths, host, (), elsewhere, chosen, is_asked=is_asked)}


@pytest.mark.parametrize(
    ("kernel", "driver", "memory", "name"),
    [
        ("6.17.0-1032-nvidia", "580.159.04", 121, ""),
        ("7.0.0-1019-nvidia", "580.159.04", 121, "kernel-7"),
        ("6.17.0-1032-nvidia", "590.48.01", 121, "driver-590"),
        ("6.17.0-1032-nvidia", "580.159.04", 60, "small-spark"),
    ],
)
def test_machines_that_are_known_to_break(
    kernel: str, driver: str, memory: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text(f"{kernel}\n")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    spark = dataclasses.replace(SPARK, memory_total=memory * GIB)
    told = list(task.known(spark, driver, manifests.load_known_issues(PROJECT)))
    assert [one.name for one in told] == [name] * bool(name)
    assert all(one.state == "advice" and one.fix for one in told)


def test_without_a_recipe_nothing_is_asked_of_the_network_or_of_another_machine(paths: Paths) -> None:
    assert rows(paths, HERE, "scripted-tiny", is_asked=False) == {} and not paths.cache.exists()
    assert rows(paths, SPARK, "qwen3.5-122b", is_asked=False, elsewhere="spark-2") == {}


@pytest.mark.parametrize(("host", "short"), [(SPARK, "MISSING"), (HERE, "advice")], ids=["spark", "elsewhere"])
@pytest.mark.parametrize("free", [30, 1000])
def test_a_recipe_s_model_takes_disk_wherever_it_is_asked_for(
    host: Host, short: str, free: int, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its headers are here; on a machine that only builds a lack of it stops nothing."""
    usage = preflight.shutil.disk_usage("/")._replace(free=free * 10**9)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage)
    row = rows(paths, host, "qwen3.5-122b")["disk in all"]
    assert row.state == ("ok" if free == 1000 else short) and bool(row.fix) == (free == 30)


def test_a_spark_without_a_driver_gets_the_table_and_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This machine, called a Spark: its other facts are its own, so it lacks what a Spark's driver brings."""
    asked: list[object] = []
    monkeypatch.setattr(machine, "read_host", lambda *_: dataclasses.replace(HERE, is_spark=True))
    monkeypatch.setattr(machine, "output", lambda argv: asked.append(argv))
    with pytest.raises(HostError, match="NVIDIA driver"):
        task.doctor(Paths.from_env(PROJECT), recipe="qwen3.5-122b")
    assert "MISSING" in capsys.readouterr().out and asked == [machine.QUERY]
