"""What no header and no rule tells: rough figures, each with where it comes from."""

from __future__ import annotations

from sparkpin.serve.memory.geometry import DTYPE_BYTES, Geometry
from sparkpin.serve.memory.settings import GIB, Settings

SPARK_TOTAL = int(121.69 * GIB)
"""What CUDA reports on a GB10 ("128 GB"): vllm-project/vllm logs of several users, 121.63 to 121.69 GiB."""

SPARK_BANDWIDTH = 273e9
"""Bytes a second, nominally; no program reaches it."""

SPARK_FREE = 110 * GIB
"""MemAvailable of an idle Spark before a start; users report 102 to 111 GiB."""

SPARK_HOST = 5 * GIB
"""Server processes outside of vLLM's budget on unified memory; users report about 5.6 GiB with graphs."""

CUDA_CONTEXT = GIB // 2
"""Context and kernels within the budget: the usual size on other GPUs, not measured on a GB10."""

NCCL = 2 * GIB
"""NCCL's buffers, pinned in the host's memory before vLLM looks at what is free. Four Sparks with TP 4 and DCP 2 had
8.1 GiB each (tonyd2wild/DeepSeek-V4.1-Flash-vLLM-DGX-Spark#8). With one peer for three that is 2.7, and less without
DCP."""

GRAPHS_PER_LAYER = int(1.29 * GIB) // 48
"""Published for the 122B model, 48 layers, vLLM 0.17, default capture sizes."""

CPU_PROCESS = GIB
"""Processes of vLLM 0.32's server on a CPU, without weights and cache: 0.95 GiB (sum of Pss) with scripted-tiny."""

CHUNK = 64
"""Tokens of a chunk of the linear attention's prefill, which keeps a state for each."""


def graphs(geometry: Geometry, settings: Settings) -> int:
    """CUDA graphs; vLLM takes them out of the budget before the KV pool since 0.21."""
    drafting = settings.drafter.layers if settings.drafter else settings.draft_layers
    return 0 if settings.eager else GRAPHS_PER_LAYER * (geometry.layers + drafting)


def activations(geometry: Geometry, settings: Settings) -> int:
    """Peak of the profiling step, which runs max_num_batched_tokens at once: its largest layer or its sampler.

    Counted are the tensors that live together: residual stream and layer norms, and of the layer its projections, chunk
    states or the experts' work buffers; of the sampler the logits at 16 bits and two float32 copies. The kernels' own
    workspaces are not, so the true peak is higher.
    """
    own, size, tokens = geometry.shard(settings.ranks), DTYPE_BYTES[settings.dtype], settings.max_num_batched_tokens
    values = own.value_heads * own.value_dim
    experts = max(1, own.experts_per_token)
    per_token = (
        size * experts * (max(2 * own.expert_width, own.hidden) + own.expert_width),
        size * (2 * own.conv_width + 3 * values) + size * values * own.key_dim // CHUNK,
        size * own.head_dim * (4 * own.heads + 2 * own.kv_heads),
    )
    # Checking drafted tokens is profiled with a second row of logits a sequence (v1/worker/gpu_model_runner.py).
    rows = min(tokens, settings.max_num_seqs) * (2 if settings.draft_tokens else 1)
    return max(tokens * (max(per_token) + 4 * size * own.hidden), rows * own.vocabulary * (size + 8))
