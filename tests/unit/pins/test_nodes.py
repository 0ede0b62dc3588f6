"""The command of each node of a release that is for several."""

from __future__ import annotations

from sparkpin.pins import nodes
from sparkpin.pins.vllm_command import flag_value

ARGV = ["vllm", "serve", "/model", "--host", "127.0.0.1", "--port", "8000", "--distributed-executor-backend", "uni"]
ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "A": "b"}


def test_one_node_changes_nothing() -> None:
    assert nodes.spread(ARGV, ENV, 1, gpu=False) == (ARGV, ENV)
    assert nodes.nodes_of(ARGV) == 1


def test_two_nodes() -> None:
    argv, env = nodes.spread(ARGV, ENV, 2, gpu=False)
    assert nodes.nodes_of(argv) == 2 and flag_value(argv, "--tensor-parallel-size") == "2"
    assert flag_value(argv, "--distributed-executor-backend") == "mp"
    assert env == {"A": "b", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert nodes.spread(ARGV, ENV, 2, gpu=True)[1] == {"A": "b"}
    own, _ = nodes.spread([*ARGV, "-pp", "2"], ENV, 2, gpu=True)
    assert flag_value(own, "--tensor-parallel-size") is None


def test_only_rank_0_has_an_address() -> None:
    argv, _ = nodes.spread(ARGV, ENV, 2, gpu=True)
    head = nodes.words_at(argv, nodes.NodeRank(0, "10.0.0.1", "10.0.0.1", "eth1"))
    place = nodes.NodeRank(1, "10.0.0.2", "10.0.0.1", "eth2")
    other = nodes.words_at(argv, place)
    assert "--headless" in other and "--headless" not in head
    assert (flag_value(head, "--port"), flag_value(other, "--port")) == ("8000", None)
    assert flag_value(head, "--master-addr") == flag_value(other, "--master-addr") == "10.0.0.1"
    assert nodes.env_at(place)["VLLM_HOST_IP"] == "10.0.0.2"
    assert nodes.env_at(place)["NCCL_SOCKET_IFNAME"] == "eth2"


def test_the_gpus_of_one_host_belong_to_several_nodes_there() -> None:
    argv, _ = nodes.spread(ARGV, ENV, 2, gpu=True)
    assert "--disable-custom-all-reduce" in nodes.words_at(argv, nodes.on_loopback(1))
    assert "--disable-custom-all-reduce" not in nodes.words_at(argv, nodes.NodeRank(0, "10.0.0.1", "10.0.0.1", "e"))
