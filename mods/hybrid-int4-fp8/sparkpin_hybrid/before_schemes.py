"""Block-FP8 layers for a vLLM whose ``INCConfig`` chooses methods by itself (0.19.1, 0.20.2).

Those know no FP8 under AutoRound at all, so the layer gets what vLLM's own ``Fp8Config`` gives it in an FP8 checkpoint:
the same parameters, named ``weight`` and ``weight_scale_inv``, and the same kernels.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from sparkpin_hybrid.entries import Fp8Entry

EXPERTS = FusedMoE


def linear(layer: Any, prefix: str, entry: Fp8Entry) -> tuple[Any, str]:
    """The quantisation method of a linear layer, and what it does, for the report."""
    config = Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=list(entry.block)
    )
    return config.get_quant_method(layer, prefix), "vLLM block FP8"


experts = linear
