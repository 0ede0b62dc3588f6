"""What the mod replaces in vLLM, and what stood there before."""

from __future__ import annotations

from vllm import _custom_ops
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.quantization.inc.schemes.inc_wna16_scheme import INCWna16Scheme
from vllm.model_executor.models import registry
from vllm.utils import cpu_triton_utils
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker import mamba_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

REPLACED = (
    (INCWna16Scheme, "get_moe_method"),
    (_custom_ops, "chunk_gated_delta_rule_cpu"),
    (GPUModelRunner, "_build_attention_metadata"),
    (gdn_attention, "_spec_forward"),
    (gdn_attention, "_causal_conv1d_fwd_cpu"),
    (registry, "_run_in_subprocess"),
    (CPUWNA16LinearKernel, "can_implement"),
    (mamba_utils, "batch_memcpy"),
    (cpu_triton_utils, "_expand_kernel_impl"),
    (topk_topp_sampler, "apply_top_k_only"),
)
STOCK = {name: getattr(owner, name) for owner, name in REPLACED}
