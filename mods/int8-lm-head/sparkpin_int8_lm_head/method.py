"""The quantisation method that takes the place of the head's own."""

from __future__ import annotations

from typing import Any

import torch
from sparkpin_modkit import ModError, report, reporting_failure
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from sparkpin_int8_lm_head import MOD, VERSION
from sparkpin_int8_lm_head.cpu import int8_linear, pad_columns
from sparkpin_int8_lm_head.quantise import quantise_head

MIB = 2**20


class Int8LMHeadMethod(QuantizeMethodBase):
    """Lets `inner` create and load the weight, then replaces it by its INT8 form."""

    def __init__(self, inner: QuantizeMethodBase) -> None:
        self.inner = inner

    def create_weights(self, layer: torch.nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        self.inner.create_weights(layer, *weight_args, **extra_weight_attrs)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        raise ModError(
            "int8-lm-head: this model ties its LM head to the input embedding, which must stay as it is; "
            "set SPARKPIN_MOD_INT8_LM_HEAD=0"
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        with reporting_failure(MOD, version=VERSION), torch.no_grad():
            weight = layer.weight.data
            head = quantise_head(weight)
            rows, columns = weight.shape
            before = weight.numel() * weight.element_size()
            # The parameter goes rather than becoming an empty one: vLLM compares the weights of a target's and a
            # drafter's head to decide whether to share them, and two empty tensors are equal.
            del layer.weight
            layer.register_buffer("weight_int8", pad_columns(head.q), persistent=False)
            layer.register_buffer("weight_row_scale", head.row_scale, persistent=False)
            layer.register_buffer("weight_column_scale", head.column_scale, persistent=False)
            self.has_column_scale = head.alpha is not None
        report(
            MOD,
            "active",
            version=VERSION,
            V=rows,
            K=columns,
            mib_before=round(before / MIB, 3),
            mib_after=round(head.nbytes / MIB, 3),
            outlier_columns=head.outlier_columns,
            alpha=head.alpha,
            weight_error=round(head.error, 5),
        )

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` ``[..., K]`` -> logits ``[..., V]`` of the same type, accumulated in float32."""
        rows = x.reshape(-1, x.shape[-1])
        if self.has_column_scale:
            rows = rows * layer.weight_column_scale
        out = int8_linear(rows, layer.weight_int8, layer.weight_row_scale).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias
