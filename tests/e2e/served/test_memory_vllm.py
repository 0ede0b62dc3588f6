"""The plan of the caches against vLLM itself: its own code for many settings, and the log of real servers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from architecture_samples import SAMPLES
from checkout import PROJECT
from cpu_stages import Service
from in_container import output_of

from sparkpin.core.paths import Paths
from sparkpin.fetch.model import repository_folder
from sparkpin.host.engine import Engine
from sparkpin.memory.cache import lay_out
from sparkpin.memory.geometry import read_geometry
from sparkpin.memory.inputs import has_wide_state
from sparkpin.memory.settings import GIB, read_settings
from sparkpin.pins import manifests, vllm_flags
from sparkpin.releases import container
from sparkpin.releases.record import Release, Releases

LENGTH = 2048  # the recipe's
LAYERS_122B: dict[str, Any] = {  # its layers; narrow, so that dummy weights are small
    "num_hidden_layers": 48,
    "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(48)],
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 64,
    "max_position_embeddings": 262_144,
    "mamba_ssm_dtype": "float32",
}
MTP2 = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # name -> changes of the config, arguments
    "plain": ({}, {}),
    "mtp-2": ({}, MTP2),
    "block-64": ({}, {"block_size": 64}),
    "fp8": ({}, {"kv_cache_dtype": "fp8"}),
    "state-bf16": ({}, {"mamba_ssm_cache_dtype": "bfloat16"}),
    "prefix-caching-mtp-2": ({}, {"enable_prefix_caching": True} | MTP2),
    "turboquant-mtp-2": ({}, {"kv_cache_dtype": "turboquant_4bit_nc"} | MTP2),
    "122b": (LAYERS_122B, {}),
    "122b-mtp-2": (LAYERS_122B, MTP2),
    "122b-32-heads": (LAYERS_122B | {"linear_num_value_heads": 32}, {}),
    "122b-32-heads-mtp-2": (LAYERS_122B | {"linear_num_value_heads": 32}, MTP2),
}


STEP = {"max_num_batched_tokens": 2048, "max_num_seqs": 8}


def base_folder() -> Path:
    paths = Paths.from_env(PROJECT)
    pin = manifests.load_model(PROJECT, "scripted-tiny")
    return repository_folder(paths, manifests.load_model_lock(PROJECT, pin).repositories[pin.base])


def base_config() -> dict[str, Any]:
    """Without quantisation, which has nothing to do with caches and would want its scales."""
    config = json.loads((base_folder() / "config.json").read_text())
    return {key: value for key, value in config.items() if key != "quantization_config"}


def argv_of(args: dict[str, Any], length: int) -> list[str]:
    words = ["vllm", "serve", "/model"]
    for name, value in ({"max_model_len": length, "enable_prefix_caching": False} | args).items():
        words = vllm_flags.set_flag(words, "--" + name.replace("_", "-"), value)
    return words


@pytest.mark.slow
def test_plans_say_what_vllm_says(stages: dict[str, Release]) -> None:
    """vLLM's own code for CASES. Dummy weights: caches do not depend on them."""
    engine, release = Engine.connect(), stages["v2-tq"]
    cases, wanted = wanted_cases()
    folders = {PROJECT / "tests/support/vllm_caches.py": "/run/vllm_caches.py", base_folder(): "/base"}
    log = output_of(
        engine,
        release.tag,
        ["python", "/run/vllm_caches.py", json.dumps(cases), "/base"],
        environment={**container.ENV, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        volumes={str(path): {"bind": where, "mode": "ro"} for path, where in folders.items()}
        | {container.cache_volume(engine, release): {"bind": container.HOME, "mode": "rw"}},
        tmpfs={"/tmp": "exec"},
    )
    rows = [json.loads(line.removeprefix("RESULT ")) for line in log.splitlines() if line.startswith("RESULT ")]
    assert {(row.pop("name"), row.pop("length"), row.pop("pool")): row for row in rows} == wanted


@pytest.fixture(scope="module")
def as_gb10(stages: dict[str, Release]) -> dict[str, Any]:
    """What vLLM's own code makes of SAMPLES on a GB10, by name."""
    script = PROJECT / "tests/support/vllm_as_gb10.py"
    cases = [
        {"name": name, "config": config, "args": STEP | args, "length": 16_384, "pool": GIB}
        for name, (config, args) in SAMPLES.items()
    ]
    log = output_of(
        Engine.connect(),
        stages["base"].tag,
        ["python", "-W", "ignore", "/run/vllm_as_gb10.py", json.dumps(cases)],
        environment={**container.ENV, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"},
        volumes={str(script): {"bind": "/run/vllm_as_gb10.py", "mode": "ro"}},
        tmpfs={"/tmp": "exec"},
    )
    rows = [json.loads(line.removeprefix("RESULT ")) for line in log.splitlines() if line.startswith("RESULT ")]
    return {row.pop("name"): row for row in rows} | {"log": log}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_every_known_architecture_is_cut_as_vllm_cuts_it_on_a_gb10(as_gb10: dict[str, Any], name: str) -> None:
    """Groups with their layers, bytes of a block and blocks of a request; blocks, tokens and concurrency."""
    config, args = SAMPLES[name]
    argv = argv_of({"enable_prefix_caching": True, "gdn_prefill_backend": "triton"} | STEP | args, 16_384)
    geometry = read_geometry(config, name)
    cache = lay_out(geometry, read_settings(vllm_flags.Flags(argv, name, {}), {}, "cuda", geometry))
    tokens, concurrency = cache.capacity(cache.blocks(GIB), 16_384)
    groups = sorted([group.layers, group.width, group.first.request_blocks(16_384)] for group in cache.groups)
    ours = {"groups": groups, "blocks": cache.blocks(GIB), "tokens": tokens, "concurrency": concurrency}
    assert as_gb10.get(name, as_gb10["log"][-4000:]) == ours


def test_the_plan_says_what_the_server_has_logged(server: Service) -> None:
    server.at()
    assert_logged(server.last, server.container.logs().decode())


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["base", "hybrid", "mtp", "v2"])
def test_plans_say_what_servers_have_logged(main_job: Releases, smoked: dict[str, Release], stage: str) -> None:
    """Those of the smoke tests."""
    assert_logged(smoked[stage], (main_job.evidence(smoked[stage]) / "smoke/server.log").read_text())


def assert_logged(release: Release, log: str) -> None:
    """The log has the numbers that are planned for the release."""
    config = json.loads((base_folder() / "config.json").read_text())
    geometry = read_geometry(config, release.stage)
    argv, env = list(release.argv), dict(release.env)
    settings = read_settings(vllm_flags.Flags(argv, "", {}), env, "cpu", geometry, wide_state=has_wide_state())
    cache = lay_out(geometry, settings)
    assert settings.kv_bytes == GIB
    tokens, concurrency = cache.capacity(cache.blocks(GIB), LENGTH)
    line = r"CPU KV cache size: (\S+) tokens, Maximum concurrency for (\S+) tokens .*: (\S+)x"
    assert re.findall(line, log) == [(f"{tokens:,}", f"{LENGTH:,}", f"{concurrency:.2f}")]


def wanted_cases() -> tuple[list[dict[str, Any]], dict[tuple[str, int, int], dict[str, Any]]]:
    """What vllm_caches.py is asked, and what the plan says of each case, length and pool."""
    cases: list[dict[str, Any]] = []
    wanted: dict[tuple[str, int, int], dict[str, Any]] = {}
    for name, (changes, args) in CASES.items():
        config = base_config() | changes
        lengths, pools = [1000, config["max_position_embeddings"]], [12_345_678, 3 * GIB + 12_345, 8 * GIB]
        cases.append(
            {"name": name, "config": config, "args": {"enable_prefix_caching": False} | args}
            | {"lengths": lengths, "pools": pools}
        )
        geometry = read_geometry(config, name)
        for length in lengths:
            flags = vllm_flags.Flags(argv_of(args, length), name, {})
            settings = read_settings(flags, {}, "cpu", geometry, wide_state=has_wide_state())
            cache = lay_out(geometry, settings)
            for pool in pools:
                blocks = cache.blocks(pool)
                tokens, concurrency = cache.capacity(blocks, length)
                if not cache.requests(blocks, length):
                    wanted[name, length, pool] = {"longest": cache.longest(blocks)}
                    continue
                wanted[name, length, pool] = {
                    "block_size": cache.kinds[0].block_size,
                    "page_bytes": cache.groups[0].first.page,
                    "groups": sorted(group.layers for group in cache.groups),
                    "blocks": blocks,
                    "tokens": tokens,
                    "concurrency": concurrency,
                }
    return cases, wanted
