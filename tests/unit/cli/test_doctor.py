"""What `invoke doctor` prints of a recipe, on a Spark and on this machine. tests/unit/host has the rest of its rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from checkout import PROJECT

from sparkpin.cli import machine as task
from sparkpin.core.errors import HostError, InputError
from sparkpin.core.paths import Paths
from sparkpin.host import machine, preflight
from sparkpin.pins import manifests

GIB = 1 << 30
HERE = dataclasses.replace(machine.read_host(), is_spark=False)


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
    spark = dataclasses.replace(HERE, is_spark=True, memory_total=memory * GIB)
    told = list(task.known(spark, driver, manifests.load_known_issues(PROJECT)))
    assert [one.name for one in told] == [name] * bool(name)
    assert all(one.state == "advice" and one.fix for one in told)


def test_a_spark_without_a_driver_gets_the_table_and_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This machine, called a Spark: its other facts are its own, so it lacks what a Spark's driver brings."""
    asked: list[object] = []
    monkeypatch.setattr(preflight, "size_of", lambda *_: 0)
    monkeypatch.setattr(machine, "read_host", lambda *_: dataclasses.replace(HERE, is_spark=True))
    monkeypatch.setattr(machine, "output", lambda argv: asked.append(argv))
    with pytest.raises(HostError, match="NVIDIA driver"):
        task.doctor(Paths.from_env(PROJECT), recipe="qwen3.5-122b")
    assert "MISSING" in capsys.readouterr().out and asked == [machine.QUERY], "the GPUs are read once"
    with pytest.raises(InputError):
        task.doctor(Paths.from_env(PROJECT), recipe="qwen3.5-122b", stack="cpu")
