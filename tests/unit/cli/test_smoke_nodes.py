"""`invoke smoke --nodes`: which machines a release is smoked on, and what each container gets. Engines are doubles: the
containers of two real ones are in tests/e2e/serve/test_two_engines.py."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from made_releases import release
from places import PROJECT

from sparkpin.cli import smoke
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.host.containers import Container
from sparkpin.host.machine import Gpu
from sparkpin.releases import container as running
from sparkpin.releases import runs_here
from sparkpin.serve import cluster
from sparkpin.serve.cluster import Cluster, ClusterOptions
from sparkpin.serve.memory_limit import Room
from sparkpin.serve.served import Service, write
from sparkpin.smoke import server

KEPT = Cluster(("here", "ssh://b"), "10.0.0.0/24")
PAIR = dataclasses.replace(release(1), stack="spark", argv=(*release(1).argv, "--nnodes", "2"))
GB10 = Gpu("NVIDIA GB10", "12.1", "580.95")


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """Of a Spark with one GPU, which this machine is not."""
    monkeypatch.setattr(runs_here, "read_gpus", lambda: (GB10,))
    monkeypatch.setattr(runs_here.machine, "this_platform", lambda: "linux/arm64")
    return Paths(PROJECT, tmp_path / "cache", tmp_path / "home")


def test_the_machines_of_a_smoke_test(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ClusterOptions("ssh://c")
    assert smoke.cluster_of(paths, PAIR, ClusterOptions()) is None
    assert smoke.cluster_of(paths, PAIR, asked) == Cluster(("here", "ssh://c"))
    with pytest.raises(InputError) as caught:
        smoke.cluster_of(paths, PAIR, ClusterOptions(link="eth1"))
    assert f"invoke smoke {PAIR.tag} --nodes here,ssh://" in caught.value.next_step
    write(paths.home, PAIR.recipe, Service(cluster=KEPT))
    assert smoke.cluster_of(paths, PAIR, ClusterOptions()) == KEPT
    assert smoke.cluster_of(paths, dataclasses.replace(PAIR, argv=release(1).argv), ClusterOptions()) is None
    monkeypatch.setattr(runs_here, "read_gpus", lambda: (GB10, GB10))  # all of it fits here
    assert smoke.cluster_of(paths, PAIR, ClusterOptions()) is None
    assert smoke.cluster_of(paths, PAIR, asked) == Cluster(("here", "ssh://c"))


def test_each_container_gets_what_its_machine_has(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faces = [SimpleNamespace(address=f"10.0.0.{n}", name=f"eth{n}", rdma=(f"r{n}",)) for n in (1, 2)]
    machines = [cluster.Machine(url, SimpleNamespace()) for url in KEPT.urls]  # type: ignore[arg-type]
    checked: Any = SimpleNamespace(
        faces=faces,
        machines=machines,
        folders=(str(tmp_path), "/there"),
        rooms=(Room(1, None, compilers=3), Room(2, None, compilers=2)),
    )
    places = [smoke.place_of(checked, rank, tmp_path) for rank in range(2)]
    made: list[dict[str, Any]] = []

    def container_of(paths: Paths, engine: Any, *rest: Any, **settings: Any) -> Any:
        made.append(settings | {"engine": engine})
        return contextlib.nullcontext(Container({"Id": str(len(made))}))

    monkeypatch.setattr(server, "container_of", container_of)
    monkeypatch.setattr(running, "cache_volume", lambda engine, release: "cache")
    for name in ("require_readable", "require_image"):
        monkeypatch.setattr(running, name, lambda *_: None)
    monkeypatch.setattr(server.Server, "wait_ready", lambda *_: None)
    with server.own_server(paths, PAIR, places) as (found, _):
        socket = str(found.socket.parent)
    here, other = made
    assert [one["mem_limit"] for one in made] == [1, 2]
    assert [one["environment"].get("MAX_JOBS") for one in made] == ["3", "2"]
    assert [one["engine"] for one in made] == [machine.engine for machine in machines]
    assert {str(tmp_path), socket, "cache"} == set(here["volumes"]) and not here["place"].where
    assert {"/there", "cache"} == set(other["volumes"]) and other["place"].where
    assert [one["environment"]["VLLM_HOST_IP"] for one in made] == ["10.0.0.1", "10.0.0.2"]
    assert [one["environment"]["NCCL_IB_HCA"] for one in made] == ["=r1", "=r2"]
    assert [one["network_mode"] for one in made] == ["host", "host"] and all(one["devices"] for one in made)
    assert "--headless" in other["command"] and "--uds" in here["command"]


def test_ctrl_c_while_a_container_is_made_leaves_none(paths: Paths) -> None:
    engine = MagicMock()
    engine.client.containers.create.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), server.container_of(paths, engine, PAIR, "smoke"):
        pass
    name = engine.client.containers.create.call_args.kwargs["name"]
    assert engine.client.api.remove_container.call_args.args == (name,)
