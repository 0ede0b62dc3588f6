"""Let an AutoRound ``extra_config`` entry choose block FP8 for single layers.

For vLLM 0.32.0: ``INCConfig`` keeps data_type and packing_format for the whole checkpoint and reads only bits,
group_size and sym per layer, although its block-FP8 scheme itself is complete. May go when ``INCConfigParser.resolve``
reads them.
"""

from __future__ import annotations

import functools
from typing import Any

from sparkpin_modkit import check_signature, require_vllm

from sparkpin_hybrid.count import LayerCount
from sparkpin_hybrid.entries import Fp8Entry, experts_entry, fp8_entry, refuse_other_layers

VLLM_VERSIONS = ("0.32.0",)
COUNT = LayerCount()


def install() -> None:
    """Wrap ``INCConfig.get_quant_method``."""
    require_vllm(VLLM_VERSIONS)
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
    from vllm.model_executor.layers.quantization.inc import INCConfig
    from vllm.model_executor.layers.quantization.inc.schemes.inc_fp8_linear import INCFp8LinearScheme
    from vllm.model_executor.layers.quantization.inc.schemes.inc_scheme import INCLinearScheme

    original = INCConfig.get_quant_method
    check_signature(original, "self, layer, prefix")
    check_signature(Fp8MoEMethod, "quant_config, layer")
    check_signature(
        Fp8Config,
        "is_checkpoint_fp8_serialized, activation_scheme, ignored_layers, weight_block_size, store_dtype",
    )
    check_signature(INCFp8LinearScheme, "prefix, weight_block_size")
    check_signature(
        INCLinearScheme.create_weights,
        "self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype, "
        "**extra_weight_attrs",
    )

    @functools.wraps(original)
    def get_quant_method(self: Any, layer: Any, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            entry = fp8_entry(prefix, self.extra_config, getattr(self, "packed_modules_mapping", None) or {})
            if entry is not None:
                return _fp8_method(prefix, entry)
        elif isinstance(layer, RoutedExperts):
            entry = experts_entry(prefix, self.extra_config)
            if entry is not None:
                return _fp8_experts(layer, prefix, entry)
        else:
            refuse_other_layers(type(layer).__name__, prefix, self.extra_config)
        return original(self, layer, prefix)

    INCConfig.get_quant_method = get_quant_method


def _fp8_method(prefix: str, entry: Fp8Entry) -> Any:
    from vllm.model_executor.layers.quantization.inc.inc_linear import INCLinearMethod
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from sparkpin_hybrid.reference import ReferenceFp8Scheme

        return COUNT.watch(INCLinearMethod(ReferenceFp8Scheme(prefix, entry.block)), "dequantised at load")
    from vllm.model_executor.layers.quantization.inc.schemes.inc_fp8_linear import INCFp8LinearScheme

    return COUNT.watch(INCLinearMethod(INCFp8LinearScheme(prefix, entry.block)), "vLLM block FP8")


def _fp8_experts(layer: Any, prefix: str, entry: Fp8Entry) -> Any:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from sparkpin_hybrid.experts import ReferenceFp8Experts

        return COUNT.watch(ReferenceFp8Experts(prefix, layer.moe_config, entry.block), "dequantised at load")
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod

    config = Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=list(entry.block)
    )
    return COUNT.watch(Fp8MoEMethod(config, layer), "vLLM block FP8")
