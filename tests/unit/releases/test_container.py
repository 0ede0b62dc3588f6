"""What a container is given: of a checkpoint, of caches of what is compiled at run time, and as one of several."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from made_releases import release

from sparkpin.core.errors import CheckpointError
from sparkpin.pins.nodes import NodeRank, on_loopback, spread
from sparkpin.releases import compile_caches, inside
from sparkpin.releases import container as running
from sparkpin.releases.container import Node, at_node
from sparkpin.serve import launch

SIZE = 3 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """With a drafter, whose files lie in a folder of their own."""
    tmp_path.chmod(0o755)
    (tmp_path / "drafter").mkdir(mode=0o755)
    for name in ("model.safetensors", "drafter/model.safetensors"):
        (tmp_path / name).write_bytes(b"x" * SIZE)
        (tmp_path / name).chmod(0o644)
    return tmp_path


def test_a_drafter_counts(checkpoint: Path) -> None:
    assert running.ready_timeout(checkpoint) == 600 + 2 * SIZE / 50e6


def test_a_server_gets_no_address_and_keeps_its_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy one is told from one that hangs by its counters, whatever the recipe says."""
    monkeypatch.setattr(running, "cache_volume", lambda *_: "cache")
    own = ("--host", "0.0.0.0", "--port", "1", "--disable-log-stats", "--max-num-seqs", "4")
    one = release(1, argv=("vllm", "serve", "/model", *own))
    engine: Any = None
    made = running.server_settings(engine, one, "v", "/run/s", None, None, memory=None, gpus=False)
    assert made["command"] == ["vllm", "serve", "/model", "--max-num-seqs", "4", "--uds", "/run/s"]
    assert made["network_mode"] == "none"


@pytest.mark.parametrize("name", ["model.safetensors", "drafter/model.safetensors", "drafter"])
def test_what_the_container_cannot_read(checkpoint: Path, name: str) -> None:
    running.require_readable(checkpoint)
    (checkpoint / name).chmod(0o600)
    with pytest.raises(CheckpointError) as caught:
        running.require_readable(checkpoint)
    assert str(checkpoint / name) in caught.value.message


LINK = NodeRank(1, "192.0.2.2", "192.0.2.1", "enp1s0f0np0")


def settings(*, gpus: bool = False, checkpoint: Path | str = "sparkpin-checkpoint-ab") -> dict[str, Any]:
    found = running.options(release(1), checkpoint, memory=None, gpus=gpus, cache="cache")
    return running.apart(found)


def test_a_node_has_its_network_and_addresses_and_no_more_rights() -> None:
    plain = settings()
    node = at_node(plain, Node(LINK), gpus=False)
    assert node["network_mode"] == "host" and node["shm_size"] == running.GIB
    added = {name: value for name, value in node["environment"].items() if name not in plain["environment"]}
    assert added["VLLM_HOST_IP"] == "192.0.2.2" and added["NCCL_SOCKET_IFNAME"] == "enp1s0f0np0"
    assert {name for name in node if node[name] != plain.get(name)} == {"environment", "network_mode", "shm_size"}


def test_each_rank_can_say_which_release_it_serves() -> None:
    of_two = dataclasses.replace(release(1), argv=tuple(spread(release(1).argv, {}, 2, gpu=False)[0]))
    told = [
        running.options(one, "v", memory=None, gpus=False, cache="c")["environment"] for one in (of_two, release(1))
    ]
    assert [env.get("SPARKPIN_RELEASE") for env in told] == [of_two.key, None]


def test_rdma_adds_its_devices_and_memory_that_stays() -> None:
    plain, node = settings(gpus=True), at_node(settings(gpus=True), Node(LINK, rdma=True), gpus=True)
    assert node["devices"] == ["/dev/infiniband:/dev/infiniband:rwm"]
    assert {name for name in node if node[name] != plain.get(name)} == {"environment", "network_mode", "devices"}


def test_nodes_of_one_machine_have_a_gpu_each() -> None:
    node = at_node(settings(gpus=True), Node(on_loopback(1), "none", gpu=1), gpus=True)
    (request,) = node["device_requests"]
    assert request["DeviceIDs"] == ["1"] and request["Count"] in (0, None)
    assert node["environment"]["NCCL_SHM_DISABLE"] == "1", "they do not share /dev/shm"
    over_a_link = at_node(settings(gpus=True), Node(LINK), gpus=True)
    assert "NCCL_SHM_DISABLE" not in over_a_link["environment"]


@pytest.mark.parametrize("own", [{}, {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "120"}])
def test_a_step_ends_before_the_health_check_gives_up(own: dict[str, str]) -> None:
    plain = settings()
    plain["environment"] |= own
    waits = launch.FAILURES * (launch.INTERVAL + inside.PATIENCE)
    seconds = at_node(plain, Node(LINK), gpus=False)["environment"]["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]
    assert seconds == (own or {"": "40"}).popitem()[1] and waits > running.EXECUTE_SECONDS


def test_process_1_learns_its_rank_and_where_the_store_is() -> None:
    told = json.loads(running.process_one(Node(LINK), {"restarts": 5})["settings.json"])
    assert told == {"restarts": 5, "rank": 1, "store": ["192.0.2.1", 29501]}
    assert json.loads(running.process_one(None, {"restarts": 5})["settings.json"]) == {"restarts": 5}


def test_one_volume_for_each_build_key() -> None:
    assert compile_caches.volume_name("f" * 64) != compile_caches.volume_name("0" * 64)


def test_every_cache_lies_in_the_volume_unless_the_release_says_otherwise() -> None:
    """The variables belong to how it is run, and to no key."""
    made = dataclasses.replace(release(1), env={"VLLM_CACHE_ROOT": "/tmp/mine", "MAX_JOBS": "3"})
    for one in (release(1), made):
        settings = running.options(one, Path("/checkpoint"), memory=1 << 36, gpus=True, cache="the-volume")
        assert settings["volumes"]["the-volume"] == {"bind": compile_caches.HOME, "mode": "rw"}
        assert settings["environment"] == {**running.ENV, **one.env}
    folders = {name: value for name, value in compile_caches.ENV.items() if name != "CUDA_CACHE_MAXSIZE"}
    assert folders.items() <= running.ENV.items()
    assert all(f"{value}/".startswith(f"{compile_caches.HOME}/") for value in folders.values())
