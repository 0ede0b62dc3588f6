"""Block-FP8 linear layer for a CPU: loaded as FP8, dequantised once, then run as an ordinary linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import Parameter
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.inc.schemes.inc_scheme import INCLinearScheme
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
    validate_fp8_block_shape,
)
from vllm.model_executor.parameter import BlockQuantScaleParameter

from sparkpin_hybrid.dequantise import dequantise_blocks
from sparkpin_hybrid.entries import BLOCK


class ReferenceFp8Scheme(INCLinearScheme):
    """Same parameters and loaders as vLLM's ``INCFp8LinearScheme``, without its kernel."""

    def __init__(self) -> None:
        self.dense = UnquantizedLinearMethod()

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        block = list(BLOCK)
        validate_fp8_block_shape(
            layer, input_size, output_size, input_size_per_partition, output_partition_sizes, block
        )
        loader = extra_weight_attrs.get("weight_loader")
        layer.weight_block_size = block
        layer.logical_widths = output_partition_sizes
        layer.orig_dtype = params_dtype
        layer.register_parameter(
            "weight", create_fp8_weight_parameter(sum(output_partition_sizes), input_size_per_partition, loader)
        )
        layer.register_parameter(
            "weight_scale_inv",
            create_fp8_scale_parameter(
                BlockQuantScaleParameter, output_partition_sizes, input_size_per_partition, block, loader
            ),
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight = dequantise_blocks(layer.weight.data, layer.weight_scale_inv.data, BLOCK, layer.orig_dtype)
        del layer.weight_scale_inv
        layer.weight = Parameter(weight, requires_grad=False)
        self.dense.process_weights_after_loading(layer)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.dense.apply(layer, x, bias)
