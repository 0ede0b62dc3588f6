"""Let an AutoRound ``extra_config`` entry choose block FP8 for single layers.

For the releases in touches.py: ``INCConfig`` keeps data_type and packing_format for the whole checkpoint and reads only
bits, group_size and sym per layer, although vLLM's block FP8 itself is complete. May go when vLLM's
``INCConfigParser.resolve`` reads them.
"""

from __future__ import annotations

import functools
from typing import Any

from sparkpin_modkit import check_vllm

from sparkpin_hybrid.count import LayerCount
from sparkpin_hybrid.entries import are_fp8_experts, is_fp8, refuse_other_layers
from sparkpin_hybrid.touches import TOUCHES

COUNT = LayerCount()


def install() -> None:
    """Wrap ``INCConfig.get_quant_method``."""
    check_vllm(TOUCHES)
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.inc import INCConfig

    from sparkpin_hybrid import schemes

    original = INCConfig.get_quant_method

    @functools.wraps(original)
    def get_quant_method(self: Any, layer: Any, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            if is_fp8(prefix, self.extra_config, getattr(self, "packed_modules_mapping", None) or {}):
                return COUNT.watch(*schemes.linear(prefix), prefix)
        elif isinstance(layer, RoutedExperts):
            if are_fp8_experts(prefix, self.extra_config):
                return COUNT.watch(*schemes.experts(layer, prefix), prefix)
        else:
            refuse_other_layers(type(layer).__name__, prefix, self.extra_config)
        return original(self, layer, prefix)

    INCConfig.get_quant_method = get_quant_method
