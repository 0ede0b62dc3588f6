"""What no header and no rule gives: rough figures with their range, and where each comes from."""

from __future__ import annotations

from typing import NamedTuple

from sparkpin.memory.geometry import DTYPE_BYTES, Geometry
from sparkpin.memory.settings import GIB, Settings

SPARK_TOTAL = int(121.69 * GIB)
"""What CUDA reports on a GB10 ("128 GB"): vllm-project/vllm logs of several users, 121.63 to 121.69 GiB."""

SPARK_BANDWIDTH = 273e9
"""Bytes a second, nominally; no program reaches it."""

SPARK_FREE = 110 * GIB
"""MemAvailable of an idle Spark before a start; users report 102 to 113 GiB, by kit."""

SPARK_SERVER = 5 * GIB
"""Outside of vLLM's budget on unified memory: the API server, and what the engine took before vLLM looked at what is
free. An owner measured 5.6 GiB with graphs (MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks#118)."""

NCCL = 2 * GIB
"""NCCL's buffers, pinned in the host's memory before vLLM looks at what is free. Four Sparks with TP 4 and DCP 2 had
8.1 GiB each (tonyd2wild/DeepSeek-V4.1-Flash-vLLM-DGX-Spark#8). With one peer for three that is 2.7, and less without
DCP."""

CPU_PROCESS = GIB
"""Processes of vLLM 0.32's server on a CPU, without weights and cache: 0.95 GiB (sum of Pss) with scripted-tiny."""

CHUNK = 64
"""Tokens of a chunk of the linear attention's prefill, which keeps a state for each."""

IMAGE_TOKENS = 16_384
"""Of the largest image of Qwen3.5 and 3.6, which vLLM encodes while it profiles (a public log: "Encoder cache will be
initialized with a budget of 16384 tokens"); more where a step has more tokens."""

IMAGE_TOKEN_BYTES = 100 << 10
"""Of the encoder, while it profiles, a token: 4 patches, whose widest layer has 4,304 values, twice, and its input. Two
RTX 5090 logged 1.59 GiB of peak activation for a 27B (noonghunna/club-3090#1087)."""


class Estimate(NamedTuple):
    """Bytes, and the range that logs had."""

    likely: int
    low: int
    high: int


HELD = Estimate(int(5.5 * GIB), int(1.5 * GIB), 8 * GIB)
"""Of the budget on unified memory, beside weights, activations and graphs. vLLM (utils/mem_utils.py, `memory_profiling`
with `is_integrated_gpu`) takes for its own all that MemAvailable fell by from its first look to the end of profiling:
heaps, compiled code, pinned buffers, CUDA's and FlashInfer's workspaces, files not yet written, other programs. Logs of
GB10 leave 1.6, 4.9, 5.5 and 7.7 GiB (docs/memory.md, "Against public logs")."""

LOADER_BUFFERS = {"instanttensor": Estimate(int(4.4 * GIB), 0, 5 * GIB)}
"""What a loader still has pinned when vLLM looks again: 12.4 GiB of cache for 17.6 with vLLM's own, in three runs each
of three owners (MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks#204)."""


def graphs(geometry: Geometry, settings: Settings) -> Estimate:
    """CUDA graphs, which vLLM takes out of the budget before the KV pool since 0.21: 27.5 MiB a layer, of the 1.29 GiB
    published for the 122B's 48 with default capture sizes.

    vLLM captures the largest few and extrapolates to all (v1/worker/gpu/cudagraph_utils.py, profile_cudagraph_memory),
    from cudaMemGetInfo, whose free memory on a GB10 falls and rises with the page cache: 0.19 to 5.1 GiB in logs; below
    0 before the V2 model runner, which takes such a result for 0 (vllm-project/vllm#44740).
    """
    if settings.eager:
        return Estimate(0, 0, 0)
    drafting = settings.drafter.layers if settings.drafter else settings.draft_layers
    return Estimate(int(1.29 * GIB) // 48 * (geometry.layers + drafting), 0, int(5.1 * GIB))


def activations(geometry: Geometry, settings: Settings) -> Estimate:
    """Peak of the profiling step, which runs max_num_batched_tokens at once: its largest layer, its sampler, or the
    vision encoder before it.

    Counted are the tensors that live together: residual stream and layer norms, and of the layer its projections, chunk
    states or the experts' work buffers; of the sampler the logits at 16 bits and two float32 copies. The kernels' own
    workspaces are not, so the true peak may be higher.
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
    text = max(tokens * (max(per_token) + 4 * size * own.hidden), rows * own.vocabulary * (size + 8))
    image = 0 if settings.text_only else max(tokens, IMAGE_TOKENS) * IMAGE_TOKEN_BYTES
    return Estimate(max(text, image), text, max(text, image) * 3 // 2)
