"""Route INT4 experts of an AutoRound (INC) checkpoint to the reference method; mend what delta_rule.py,
draft_blocks.py, drafts.py, inspection.py, linear.py, one_token.py, prefix.py and sampling.py say.

For vLLM 0.32.0, whose ``INCWna16Scheme.get_moe_method`` says "CPU does not support quantized MoE yet" and returns the
unquantised method, into which packed weights cannot be loaded. May go when that function returns a quantised one.
"""

from __future__ import annotations

import functools
from typing import Any

from sparkpin_modkit import UnsupportedPlatform, check_signature, require_vllm

from sparkpin_vllm_cpu import delta_rule, draft_blocks, drafts, inspection, one_token, prefix, sampling

VLLM_VERSIONS = ("0.32.0",)


def install() -> None:
    """Wrap ``INCWna16Scheme.get_moe_method`` and replace what the other files name."""
    require_vllm(VLLM_VERSIONS)
    from vllm.model_executor.layers.quantization.inc.schemes.inc_wna16_scheme import INCWna16Scheme
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise UnsupportedPlatform(
            f"the mod vllm-cpu is for vLLM's CPU platform, this is {current_platform.device_type!r}; "
            "leave it out of this image or set SPARKPIN_MOD_VLLM_CPU=0"
        )
    original = INCWna16Scheme.get_moe_method
    check_signature(original, "self, config, layer, prefix, layer_config")
    from sparkpin_vllm_cpu import linear

    delta_rule.install()
    draft_blocks.install()
    drafts.install()
    inspection.install()
    linear.install()
    one_token.install()
    prefix.install()
    sampling.install()

    @functools.wraps(original)
    def get_moe_method(self: Any, config: Any, layer: Any, prefix: str, layer_config: Any) -> Any:
        if layer_config.bits == 4 and layer_config.sym and layer_config.is_gptq:
            from sparkpin_vllm_cpu.experts import ReferenceInt4Experts

            return ReferenceInt4Experts(layer.moe_config, layer_config.group_size)
        raise UnsupportedPlatform(
            f"{prefix}: experts with bits={layer_config.bits}, sym={layer_config.sym}, "
            f"packing_format={layer_config.packing_format!r}; "
            "on a CPU expected bits=4, sym=True, packing_format auto_gptq"
        )

    INCWna16Scheme.get_moe_method = get_moe_method
