"""The CUDA backend for vLLM 0.20.2, where backends state the cache's shape and hybrid models are refused.

What `install` replaces there, for hybrid models (Gated DeltaNet or Mamba besides attention) with this type of cache:

- ``EngineArgs.create_engine_config`` raises for them, as it would keep the first and last two layers at full width, and
  those of a hybrid model have no attention. Here the engine is configured for the model's own type, then told of this.
- ``Platform._align_hybrid_block_size`` takes a token's bytes for those of one byte a component.
- ``Attention._init_turboquant_buffers`` reserves memory for vLLM's own kernels, a gigabyte for some models.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.platforms.interface import Platform

from sparkpin_turboquant.common import vllm_slot_bytes
from sparkpin_turboquant.formats import FORMATS
from sparkpin_turboquant.gpu import BLOCK_SIZE, GpuBackend, GpuImpl, GpuMetadataBuilder


class TurboQuantBackend(GpuBackend):
    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, block_size, num_kv_heads, vllm_slot_bytes(FORMATS[cache_dtype_str], head_size)


class Builder(GpuMetadataBuilder):
    def slot_bytes(self, kv_cache_spec: Any) -> int:
        return int(kv_cache_spec.tq_slot_size)


class Impl(GpuImpl):
    """A cache has the shape that the backend says, ``[blocks, block_size, Hkv, slot]``."""

    def rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        return super().rows(kv_cache.transpose(1, 2))

    def block(self, kv_cache: torch.Tensor) -> tuple[int, int]:
        return kv_cache.shape[1], kv_cache.shape[3]


def install() -> None:
    """Replace the three methods. May go with the support of this release."""
    create, align, reserve = (
        EngineArgs.create_engine_config,
        Platform._align_hybrid_block_size.__func__,
        Attention._init_turboquant_buffers,
    )

    @functools.wraps(create)
    def create_engine_config(self: Any, usage_context: Any = None, headless: bool = False) -> Any:
        wanted = self.kv_cache_dtype
        try:
            return create(self, usage_context, headless)
        except NotImplementedError as refusal:
            if wanted not in FORMATS or "hybrid" not in str(refusal):
                raise
        self.kv_cache_dtype = "auto"
        try:
            config = create(self, usage_context, headless)
        finally:
            self.kv_cache_dtype = wanted
        config.cache_config.cache_dtype = wanted
        return config

    @functools.wraps(align)
    def align_hybrid_block_size(cls: Any, vllm_config: Any, backend_cls: Any) -> None:
        if vllm_config.cache_config.cache_dtype not in FORMATS:
            align(cls, vllm_config, backend_cls)
            return
        align_packed(vllm_config)

    @functools.wraps(reserve)
    def init_turboquant_buffers(self: Any, cache_dtype: str, head_size: int, prefix: str) -> None:
        pass

    EngineArgs.create_engine_config = create_engine_config
    Platform._align_hybrid_block_size = classmethod(align_hybrid_block_size)
    Attention._init_turboquant_buffers = init_turboquant_buffers


def align_packed(vllm_config: Any) -> None:
    """Blocks of as many tokens as make an attention page no smaller than a state's, and states padded to that page."""
    cache, model, parallel = vllm_config.cache_config, vllm_config.model_config, vllm_config.parallel_config
    if cache.mamba_cache_mode == "all":
        raise NotImplementedError("turboquant: mamba_cache_mode 'all'; wanted 'align' or no prefix caching")
    token = model.get_num_kv_heads(parallel) * vllm_slot_bytes(FORMATS[cache.cache_dtype], model.get_head_size())
    model_class = get_model_cls(model)
    shapes = model_class.get_mamba_state_shape_from_config(vllm_config)
    dtypes = model_class.get_mamba_state_dtype_from_config(vllm_config)
    state = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    step = max(BLOCK_SIZE, cache.block_size)
    cache.block_size = max(cache.block_size, step * -(-state // (step * token)))
    if cache.mamba_cache_mode == "align":
        cache.mamba_block_size = cache.block_size
    cache.mamba_page_size_padded = cache.block_size * token
