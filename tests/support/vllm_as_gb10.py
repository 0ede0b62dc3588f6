"""Runs in the image, under vLLM 0.32 for a CPU: what its own code makes of a model's caches on a GB10.

Usage: python vllm_as_gb10.py CASES. CASES: a list as JSON. A case: name, config (of the model), args (of EngineArgs),
length, pool; for each one line `RESULT <json>`, or `FAILED <name>: <why>`.

vLLM is told that it runs on CUDA of compute capability 12.1. Models are built on PyTorch's device `meta`, so neither a
GPU nor a kernel is needed: what is asked are the classes of layers and attention backends, the block size that they
agree on, and the groups of the KV cache. Packages of kernels are stubs.
"""

# ruff: noqa: E402
from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ |= {"SPARKPIN_MOD_VLLM_CPU": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
MEMORY = 130_663_727_104
KERNELS = (
    "flashinfer",
    "tilelang",
    "deep_gemm",
    "vllm.vllm_flash_attn",
    "vllm.third_party.flashmla",
    "vllm.third_party.deep_gemm",
)
COMPILED = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm._moe_C", "vllm._flashkda_C")


class Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_stub = (
            name in COMPILED
            or name.endswith("_cutedsl")
            or any(name == one or name.startswith(f"{one}.") for one in KERNELS)
        )
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_stub else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Stub:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []
        module.__version__ = "0.6.0"


sys.meta_path.insert(0, Stubs())

import torch
import torch._ops
import torch.utils._device
from sparkpin_vllm_cpu import torchvision_ops

torchvision_ops.declare_missing_operators()
import transformers  # noqa: F401  # before vLLM asks for CUDA

operator = torch._ops._OpNamespace.__getattr__
is_ready = False


def find_operator(self: Any, name: str) -> Any:
    try:
        return operator(self, name)
    except AttributeError:
        if "supports" in name:
            return lambda *a, **k: True
        if is_ready and self.name in ("_C", "_moe_C", "_C_cache_ops", "_flashkda_C"):
            return MagicMock(name=name)
        raise


torch._ops._OpNamespace.__getattr__ = find_operator


class Properties:
    multi_processor_count, total_memory, major, minor, is_integrated = 48, MEMORY, 12, 1, 1
    name, shared_memory_per_block_optin = "NVIDIA GB10", 101_376


class Nothing:
    """A stream or an event."""

    def __init__(self, *a: Any, **k: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *a, **k: None


for name, value in {
    "get_device_capability": lambda *a: (12, 1),
    "get_device_properties": lambda *a: Properties,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "is_available": lambda: True,
    "set_device": lambda *a: None,
    "current_stream": Nothing,
    "Stream": Nothing,
    "Event": Nothing,
}.items():
    setattr(torch.cuda, name, value)


def unpinned(make: Any) -> Any:
    @functools.wraps(make)
    def wrapped(*args: Any, **named: Any) -> Any:
        named.pop("pin_memory", None)
        return make(*args, **named)

    return wrapped


torch.utils._device._device_constructors()  # remembers the functions by what they are now
for name in ("empty", "zeros", "ones", "full", "tensor"):
    setattr(torch, name, unpinned(getattr(torch, name)))

import vllm.platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability


class GB10(NonNvmlCudaPlatform):
    device_type, dist_backend = "meta", "gloo"
    get_device_capability = staticmethod(lambda *a, **k: DeviceCapability(12, 1))
    get_device_name = staticmethod(lambda *a, **k: "NVIDIA GB10")
    get_device_total_memory = staticmethod(lambda *a, **k: MEMORY)
    is_integrated_gpu = staticmethod(lambda *a, **k: True)
    num_compute_units = staticmethod(lambda *a, **k: 48)
    device_count = staticmethod(lambda: 1)
    set_device = staticmethod(lambda *a: None)
    import_kernels = staticmethod(lambda *a: None)
    is_pin_memory_available = staticmethod(lambda: False)
    current_device = staticmethod(lambda: "meta")


vllm.platforms._current_platform = GB10()

import vllm.models.qwen4_exp.common.ngram_embedding as tables
import vllm.utils.flashinfer
from vllm.config import set_current_vllm_config
from vllm.config.vllm import get_layers_from_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.triton_utils import triton
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends import utils
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

for name in dir(vllm.utils.flashinfer):
    if name.startswith(("has_", "can_", "supports_")):
        setattr(vllm.utils.flashinfer, name, lambda *a, **k: True)
tables.is_uva_available = lambda: True
triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
triton.cdiv = lambda a, b: -(-a // b)
registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())
is_ready = True


def caches(case: dict[str, Any]) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(case["config"]))
    named = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": case["length"], **case["args"]}
    config = EngineArgs(model=str(folder), **named).create_engine_config(UsageContext.OPENAI_API_SERVER)
    core.register_all_kvcache_specs(config)
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/meet", 0, "gloo")
        parallel_state.destroy_model_parallel()
        parallel_state.ensure_model_parallel_initialized(1, 1)
        before = torch.get_default_dtype()
        torch.set_default_dtype(config.model_config.dtype)
        try:
            with torch.device("meta"):
                initialize_model(config)
                if config.speculative_config:
                    initialize_model(config, model_config=config.speculative_config.draft_model_config)
        finally:
            torch.set_default_dtype(before)
        GB10.update_block_size_for_backend(config)
        specs = get_kv_cache_spec(config)
        backends = {
            layer.get_attn_backend() for layer in get_layers_from_vllm_config(config, AttentionLayerBase).values()
        }
        names = [layout.name for layout in utils.get_supported_kv_cache_layouts(backends)]
        utils.resolve_kv_cache_layout(config, [names], specs.values())
        made = kv_cache_utils.get_kv_cache_configs(config, [specs], [case["pool"]])
    tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(config, made[0])
    groups = []
    for group in made[0].kv_cache_groups:
        spec, each = group.kv_cache_spec, getattr(group.kv_cache_spec, "kv_cache_specs", {})
        pages = [each.get(name, spec).page_size_bytes for name in group.layer_names]
        groups.append([len(pages), sum(pages), -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)])
    return {"groups": sorted(groups), "blocks": made[0].num_blocks, "tokens": tokens, "concurrency": concurrency}


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        try:
            print("RESULT", json.dumps({"name": each["name"]} | caches(each)), flush=True)
        except Exception as error:
            print(f"FAILED {each['name']}: {type(error).__name__}: {error}", flush=True)
