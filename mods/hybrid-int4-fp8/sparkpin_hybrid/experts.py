"""Block-FP8 experts for a CPU: loaded as FP8, dequantised once, then run by vLLM's unquantised CPU experts."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import Parameter
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported, UnquantizedFusedMoEMethod
from vllm.model_executor.utils import set_weight_attrs

from sparkpin_hybrid.dequantise import dequantise_blocks
from sparkpin_hybrid.entries import BLOCK


class ReferenceFp8Experts(UnquantizedFusedMoEMethod):
    """Same parameters and loaders as vLLM's ``Fp8MoEMethod`` with blocks, without its kernel.

    w13_weight ``[E, 2 I, H]``, w2_weight ``[E, H, I]`` float8_e4m3fn; their ``weight_scale_inv`` float32, one for each
    block. ``2 I`` is gate over up, so `I` must be a multiple of the block.
    """

    def __init__(self, prefix: str, moe: Any) -> None:
        super().__init__(moe)
        self.prefix = prefix

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        if intermediate_size_per_partition % BLOCK[0]:
            raise ValueError(
                f"{self.prefix}: experts of {intermediate_size_per_partition} rows, expected a multiple of the FP8 "
                f"block's {BLOCK[0]}"
            )
        layer.weight_block_size = list(BLOCK)
        layer.orig_dtype = params_dtype
        shapes = {
            "w13": (2 * intermediate_size_per_partition, hidden_size),
            "w2": (hidden_size, intermediate_size_per_partition),
        }
        for name, (rows, columns) in shapes.items():
            weight = torch.empty(num_experts, rows, columns, dtype=torch.float8_e4m3fn)
            blocks = -(-rows // BLOCK[0]), -(-columns // BLOCK[1])
            scale = torch.empty(num_experts, *blocks, dtype=torch.float32)  # vLLM's default is the model's dtype
            attributes = {
                f"{name}_weight": (weight, extra_weight_attrs),
                f"{name}_weight_scale_inv": (
                    scale,
                    {**extra_weight_attrs, "quant_method": FusedMoeWeightScaleSupported.BLOCK.value},
                ),
            }
            for parameter, (tensor, attrs) in attributes.items():
                layer.register_parameter(parameter, Parameter(tensor, requires_grad=False))
                set_weight_attrs(getattr(layer, parameter), attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in ("w13", "w2"):
            scale = getattr(layer, f"{name}_weight_scale_inv").data
            packed = getattr(layer, f"{name}_weight").data
            weight = torch.empty(packed.shape, dtype=layer.orig_dtype)
            for expert in range(packed.shape[0]):
                weight[expert] = dequantise_blocks(packed[expert], scale[expert], BLOCK, layer.orig_dtype)
            delattr(layer, f"{name}_weight_scale_inv")
            delattr(layer, f"{name}_weight")
            layer.register_parameter(f"{name}_weight", Parameter(weight, requires_grad=False))
        super().process_weights_after_loading(layer)
