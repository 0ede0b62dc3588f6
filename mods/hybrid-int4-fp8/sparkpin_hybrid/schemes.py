"""The quantisation methods of block-FP8 layers, for vLLM's ``INCConfig``, which is made of schemes."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from sparkpin_hybrid.entries import BLOCK


def linear(prefix: str) -> tuple[Any, str]:
    """The quantisation method of a linear layer, and what it does, for the report."""
    from vllm.model_executor.layers.quantization.inc.inc_linear import INCLinearMethod

    if current_platform.is_cpu():
        from sparkpin_hybrid.reference import ReferenceFp8Scheme

        return INCLinearMethod(ReferenceFp8Scheme()), "dequantised at load"
    from vllm.model_executor.layers.quantization.inc.schemes.inc_fp8_linear import INCFp8LinearScheme

    return INCLinearMethod(INCFp8LinearScheme(prefix, BLOCK)), "vLLM block FP8"


def experts(layer: Any, prefix: str) -> tuple[Any, str]:
    """The quantisation method of a layer of routed experts, and what it does."""
    if current_platform.is_cpu():
        from sparkpin_hybrid.experts import ReferenceFp8Experts

        return ReferenceFp8Experts(prefix, layer.moe_config), "dequantised at load"
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod

    config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=list(BLOCK))
    return Fp8MoEMethod(config, layer), "vLLM block FP8"
