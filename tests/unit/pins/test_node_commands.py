"""The command of each node of a release that is for several."""

from __future__ import annotations

import pytest
from places import PROJECT

from sparkpin.core.errors import ManifestError
from sparkpin.pins import manifests, nodes
from sparkpin.pins.vllm_command import serve_argv
from sparkpin.pins.vllm_flags import flag_value

ARGV = ["vllm", "serve", "/model", "--host", "127.0.0.1", "--port", "8000", "--distributed-executor-backend", "uni"]
ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "A": "b"}


def test_one_node_changes_nothing_and_two_have_what_they_need() -> None:
    assert nodes.spread(ARGV, ENV, 1, gpu=False) == (ARGV, ENV) and nodes.nodes_of(ARGV) == 1
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
    assert {"VLLM_HOST_IP": "10.0.0.2", "NCCL_SOCKET_IFNAME": "eth2"}.items() <= nodes.env_at(place).items()
    alone = "--disable-custom-all-reduce"  # the GPUs of one host belong to several nodes there
    assert alone in nodes.words_at(argv, nodes.on_loopback(1)) and alone not in [*head, *other]


def test_what_stack_and_stages_set_does_not_undo_it_and_ray_is_refused() -> None:
    recipe = manifests.load_recipe(PROJECT, "scripted-pair")
    stack, chain = manifests.load_stack(PROJECT, recipe.stack), manifests.load_chain(PROJECT, recipe.stage)
    argv, env = serve_argv(recipe, stack, chain)
    assert argv[-4:] == ["--distributed-executor-backend", "mp", "--nnodes", "2"]
    assert nodes.IN_PROCESS in stack.serve.env and nodes.IN_PROCESS not in env
    assert nodes.spread(argv, env, 2, gpu=False) == (argv, env)
    ray = recipe.model_copy(update={"command": f"{recipe.command.rstrip()} --distributed-executor-backend ray"})
    with pytest.raises(ManifestError, match="expected mp"):
        serve_argv(ray, stack, chain)
    alone = serve_argv(recipe.model_copy(update={"nodes": 1, "defaults": recipe.defaults}), stack, chain)[0]
    assert nodes.nodes_of(alone) == 1 and flag_value(alone, "--distributed-executor-backend") == "uni"


@pytest.mark.parametrize(
    ("count", "flags", "wanted"),
    [
        (2, "-tp 2", []),
        (2, "-tp 4", ["--tensor-parallel-size 4, --pipeline-parallel-size 1 for 2 nodes"]),
        (1, "--nnodes 2 --node-rank 0 --master-addr 10.0.0.1", ["--master-addr", "--node-rank", "--nnodes 2"]),
        (2, "-tp 2 --headless", ["--headless"]),
        (2, "-tp 2 -dp 2", ["--data-parallel-size"]),
    ],
)
def test_words_that_no_number_of_machines_goes_with(count: int, flags: str, wanted: list[str]) -> None:
    faults = list(nodes.word_faults([*ARGV, *flags.split()], count, "recipes/r.yaml"))
    assert len(faults) == len(wanted), faults
    assert all(str(fault.got).startswith(seen) for fault, seen in zip(faults, wanted, strict=True)), faults
