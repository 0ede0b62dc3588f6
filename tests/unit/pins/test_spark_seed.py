"""The stack that is nearest to the seeds' own: what its recipe makes of it, and one CUDA release in its lock."""

from __future__ import annotations

import json
import re
from pathlib import Path

from places import PROJECT, SUPPORT

from sparkpin.build.pair import pair
from sparkpin.history.prune.garbage import project_needs
from sparkpin.pins import manifests

STAGES = ("base", "hybrid", "mtp", "v2", "v2-tq")


def test_every_stage_of_the_recipe_renders() -> None:
    pairings = pair(PROJECT, "scripted-tiny-spark-seed", stage="v2-tq", stack_name="spark-seed")
    assert tuple(pairing.stage.name for pairing in pairings) == STAGES
    assert {pairing.rendered.platform for pairing in pairings} == {"linux/arm64"}
    assert "ENV CUDA_HOME=/opt/vllm/lib/python3.11/site-packages/nvidia/cu13" in pairings[0].rendered.dockerfile


def test_keys_differ_from_those_of_the_stack_spark() -> None:
    """Same stages, same mods, other wheels: nothing may be taken for the other."""
    seed, spark = (
        pair(PROJECT, recipe, stage="v2-tq") for recipe in ("scripted-tiny-spark-seed", "scripted-tiny-spark")
    )
    assert not {pairing.rendered.key for pairing in seed} & {pairing.rendered.key for pairing in spark}


def test_compiler_headers_and_runtime_are_of_one_cuda_release() -> None:
    stack = manifests.load_stack(PROJECT, "spark-seed")
    locked = {wheel.name: wheel.version for wheel in manifests.load_stack_lock(PROJECT, stack).wheels}
    parts = ("nvcc", "crt", "cccl", "runtime", "nvrtc")
    versions = [locked[f"nvidia-cuda-{part}"] for part in parts] + [locked["nvidia-nvvm"], locked["nvidia-nvjitlink"]]
    assert stack.gpu and {re.sub(r"\.\d+$", "", version) for version in versions} == {stack.gpu.cuda}
    assert (locked["vllm"], locked["flashinfer-cubin"]) == ("0.20.2", "0.6.8.post1")
    assert not [name for name in locked if re.search(r"-cu12$|-cu12-", name)]


def test_a_stack_that_is_not_locked_yet_does_not_stop_prune(project: Path) -> None:
    """Nothing was fetched for it. `spark-seed-source` waits for a machine that reaches PyTorch's index and GitHub."""
    before = project_needs(project)
    assert before.inputs
    (project / "pins/stacks/spark-seed.lock").unlink()
    assert project_needs(project).inputs < before.inputs


def test_kernels_are_tested_with_the_compilers_that_a_spark_has() -> None:
    lines = (PROJECT / "pins/stacks/spark.lock").read_text().splitlines()
    ours = (SUPPORT / "triton.lock").read_text()
    for name in ("triton", "nvidia-cuda-nvrtc", "cuda-bindings", "cuda-pathfinder"):
        [locked] = [json.loads(line.strip().rstrip(",")) for line in lines if f'{{"name": "{name}",' in line]
        assert re.findall(rf"^{name}==(\S+)", ours, re.MULTILINE) == [locked["version"]]
        assert f"sha256:{locked['sha256']}" in ours  # the hashes are of the same files, whatever index they came from
