"""Let an AutoRound ``extra_config`` entry choose block FP8 for single layers.

For the releases in touches.py: ``INCConfig`` keeps data_type and packing_format for the whole checkpoint and reads only
bits, group_size and sym per layer, although vLLM's block FP8 itself is complete. May go when vLLM's
``INCConfigParser.resolve`` reads them.
"""

from __future__ import annotations

import functools
from typing import Any

from sparkpin_modkit import UnsupportedPlatform, check_vllm

from sparkpin_hybrid.count import LayerCount
from sparkpin_hybrid.entries import experts_entry, fp8_entry, refuse_other_layers
from sparkpin_hybrid.touches import BEFORE_SCHEMES, REFUSED, TOUCHES

COUNT = LayerCount()


def install() -> None:
    """Wrap ``INCConfig.get_quant_method``."""
    release = check_vllm(TOUCHES, REFUSED)
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.inc import INCConfig
    from vllm.platforms import current_platform

    forms: Any
    if release in BEFORE_SCHEMES:
        if current_platform.is_cpu():
            raise UnsupportedPlatform(
                f"hybrid-int4-fp8: vLLM {release} runs no AutoRound INT4 experts on a CPU, so there is nothing to add "
                "FP8 to; use 0.32.0 there or set SPARKPIN_MOD_HYBRID_INT4_FP8=0"
            )
        from sparkpin_hybrid import before_schemes as forms
    else:
        from sparkpin_hybrid import schemes as forms

    original = INCConfig.get_quant_method

    @functools.wraps(original)
    def get_quant_method(self: Any, layer: Any, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            entry = fp8_entry(prefix, self.extra_config, getattr(self, "packed_modules_mapping", None) or {})
            if entry is not None:
                return COUNT.watch(*forms.linear(layer, prefix, entry), prefix)
        elif isinstance(layer, forms.EXPERTS):
            entry = experts_entry(prefix, self.extra_config)
            if entry is not None:
                return COUNT.watch(*forms.experts(layer, prefix, entry), prefix)
        else:
            refuse_other_layers(type(layer).__name__, prefix, self.extra_config)
        return original(self, layer, prefix)

    INCConfig.get_quant_method = get_quant_method
