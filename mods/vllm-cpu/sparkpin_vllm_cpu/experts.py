"""INT4 experts, dequantised at load and then run by vLLM's unquantised CPU experts."""

from __future__ import annotations

from typing import Any

import torch
from sparkpin_modkit import report
from torch.nn.parameter import Parameter
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config, MoeWNA16Method

from sparkpin_vllm_cpu import MOD, VERSION
from sparkpin_vllm_cpu.int4 import dequantise_int4
from sparkpin_vllm_cpu.linear import has_int4_product

_created = 0
_loaded = 0


class ReferenceInt4Experts(UnquantizedFusedMoEMethod):
    """Loads GPTQ-packed symmetric INT4 experts through vLLM's own MoeWNA16 loader, then expands them."""

    def __init__(self, moe: Any, group_size: int) -> None:
        super().__init__(moe)
        # What MoeWNA16Method.create_weights and its weight loader read of `self` and of the layer.
        self.quant_config = MoeWNA16Config.from_config(
            {"quant_method": "gptq", "bits": 4, "group_size": group_size, "sym": True, "lm_head": False}
        )

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        global _created
        self.params_dtype = params_dtype
        MoeWNA16Method.create_weights(
            self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
        )
        _created += 1

    def process_weights_after_loading(self, layer: Any) -> None:
        global _loaded
        for name in ("w13", "w2"):
            weight = dequantise_int4(
                getattr(layer, f"{name}_qweight").data, getattr(layer, f"{name}_scales").data, self.params_dtype
            )
            for suffix in ("qweight", "scales", "qzeros"):
                delattr(layer, f"{name}_{suffix}")
            layer.register_parameter(f"{name}_weight", Parameter(weight, requires_grad=False))
        super().process_weights_after_loading(layer)
        _loaded += 1
        if _loaded == _created:
            report(
                MOD, "active", version=VERSION, int4_expert_layers=_loaded, method="dequantised at load",
                int4_layers="vLLM's kernel" if has_int4_product() else "expanded at load",
            )  # fmt: skip
