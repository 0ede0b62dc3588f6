"""Memory plans of the published 122B, from headers of its shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import qwen_samples

from sparkpin.checkpoint.safetensors import TensorInfo, tensor_nbytes
from sparkpin.memory.cache import Cache, lay_out
from sparkpin.memory.geometry import Geometry, read_geometry
from sparkpin.memory.plan import SPARK_FREE, SPARK_TOTAL, Machine, MemoryPlan, make_plan
from sparkpin.memory.settings import Platform, Settings, read_settings
from sparkpin.memory.weights import WeightKind, alike, weigh
from sparkpin.pins.vllm_flags import Flags

MAX = 262_144
MTP2 = """--speculative-config {"method":"mtp","num_speculative_tokens":2}"""
LISTED = """--additional-config {"draft_vocabulary":{"first":32768}}"""
IN_4_BITS = """--additional-config {"draft_head":{"bits":4}}"""
SERVED = " --max-model-len 40960 --gdn-prefill-backend triton"
SPARK = Machine(SPARK_TOTAL, SPARK_FREE, "an idle DGX Spark", "estimate")

COMPLETED = {"max_position_embeddings": MAX, "mamba_ssm_dtype": "float32", "num_experts_per_tok": 8}


def geometry_of(sizes: qwen_samples.Geometry, **changes: Any) -> Geometry:
    """The made-up config, completed with what caches need and a checkpoint does not."""
    config = qwen_samples.config_of(sizes, qwen_samples.MULTIMODAL, {})
    config["text_config"] |= COMPLETED | changes
    return read_geometry(config, "config.json")


def geometry_122b(**changes: Any) -> Geometry:
    return geometry_of(qwen_samples.G122B, **changes)


def settings_of(geometry: Geometry, flags: str = "", platform: Platform = "cpu", **env: str) -> Settings:
    argv = ["vllm", "serve", "/model", *flags.split()]
    return read_settings(Flags(argv, "recipes/r.yaml", {}), env, platform, geometry, mods={"draft-vocabulary"})


def loaded(**changes: Any) -> Settings:
    """How the 122B is loaded on a GPU, without a drafter."""
    return replace(settings_of(geometry_122b(), platform="cuda"), **changes)


def cache_of(flags: str = "", platform: Platform = "cpu", **changes: Any) -> Cache:
    geometry = geometry_122b(**changes)
    return lay_out(geometry, settings_of(geometry, flags, platform))


def plan_122b(
    flags: str, machine: Machine = SPARK, *, platform: Platform = "cuda", int8_head: bool = False
) -> MemoryPlan:
    geometry = geometry_122b()
    settings = settings_of(geometry, flags, platform)
    return make_plan(geometry, settings, weights_122b(replace(settings, int8_head=int8_head)), machine)


@cache
def tensors_122b() -> Counter[TensorInfo]:
    """Each as if it lay at the begin of a file: what a plan counts is sizes."""
    files = qwen_samples.int4_files(qwen_samples.G122B).values()
    specs = (spec for file in files for spec in file.items())
    infos = (TensorInfo(name, dtype, shape, 0, tensor_nbytes(dtype, shape)) for name, (dtype, shape) in specs)
    return alike(infos, geometry_122b().layers)


def weights_122b(settings: Settings) -> list[WeightKind]:
    return weigh(tensors_122b(), geometry_122b(), settings)
