"""Where a served image keeps what it compiles at run time: one volume for each build key, and the variables that point
into it. Pure.

Read in vLLM 0.33.0, PyTorch 2.13, FlashInfer 0.7.2.post1 and 0.6.8.post1. What a model does not use costs nothing.
"""

from __future__ import annotations

HOME = "/home/sparkpin"  # the volume is mounted here: programs that ask no variable write below it, too
ROOT = f"{HOME}/.cache"

CUDA_CACHE_BYTES = 4 << 30
"""The most that the driver takes (CUDA C++ Programming Guide, CUDA_CACHE_MAXSIZE); its own default is 1 GiB, past which
it throws out what FA2's PTX became."""

ENV = {
    # torch.compile's graphs, inspected models, DeepGEMM's kernels (vllm/envs.py, vllm/utils/deep_gemm.py).
    "VLLM_CACHE_ROOT": f"{ROOT}/vllm",
    # vLLM sets it while it compiles a model; what is compiled before that would go to /tmp (cache_dir_utils.py).
    "TORCHINDUCTOR_CACHE_DIR": f"{ROOT}/inductor",
    # vLLM keeps to it when it is set (vllm/compilation/compiler_interface.py).
    "TRITON_CACHE_DIR": f"{ROOT}/triton",
    "TORCH_EXTENSIONS_DIR": f"{ROOT}/torch_extensions",
    # FlashInfer adds .cache/flashinfer/<its version>/<architecture> itself (flashinfer/jit/env.py) and reads no other
    # variable for it: FLASHINFER_JIT_DIR is a name in that module.
    "FLASHINFER_WORKSPACE_BASE": HOME,
    # Off by default; for who turns it on, since it would be in /tmp (vllm/vllm_flash_attn/cute/cache_utils.py).
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{ROOT}/flash_attention_cute",
    # What the driver makes of PTX.
    "CUDA_CACHE_PATH": f"{ROOT}/cuda",
    "CUDA_CACHE_MAXSIZE": str(CUDA_CACHE_BYTES),
}


def volume_name(build_key: str) -> str:
    """Another build never meets this one's caches; each start of the same build does."""
    return f"sparkpin-cache-{build_key[:12]}"
