"""Give vLLM's CPU and CUDA platforms an attention backend for ``--kv-cache-dtype turboquant_*``.

For the releases in touches.py. The backend takes the place of vLLM's own under the registry's name TURBOQUANT; any
other cache type gets what vLLM itself would choose. The CUDA platform asks the registry for this type by itself. On a
CPU vLLM 0.32.0 accepts the option and then serves wrong text, as its CPU backend ignores the cache's type; 0.33.0
refuses it: so there the platform's choice is replaced too.
"""

from __future__ import annotations

from typing import Any

from sparkpin_modkit import UnsupportedPlatform, check_vllm

from sparkpin_turboquant.formats import format_of
from sparkpin_turboquant.touches import ON_CUDA, TOUCHES

ON_CPU = "sparkpin_turboquant.cpu.TurboQuantBackend"
ON_GPU = "sparkpin_turboquant.gpu.GpuBackend"


def install() -> None:
    """Register the backend, and replace what the platform needs replaced."""
    check_vllm(TOUCHES)
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cuda():
        check_vllm(ON_CUDA)
        register_backend(AttentionBackendEnum.TURBOQUANT, ON_GPU)
    elif current_platform.is_cpu():
        choose_on_cpu()
        register_backend(AttentionBackendEnum.TURBOQUANT, ON_CPU)
    else:
        raise UnsupportedPlatform(
            f"turboquant runs on vLLM's CUDA and CPU platforms, this is {current_platform.device_type!r}; "
            "set SPARKPIN_MOD_TURBOQUANT=0"
        )


def choose_on_cpu() -> None:
    """Wrap ``CpuPlatform.get_attn_backend_cls``."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    original = CpuPlatform.get_attn_backend_cls

    def get_attn_backend_cls(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        dtype = attn_selector_config.kv_cache_dtype
        if dtype is None or not dtype.startswith("turboquant"):
            return str(original.__func__(cls, selected_backend, attn_selector_config, num_heads))
        format_of(dtype)
        return str(AttentionBackendEnum.TURBOQUANT.get_path())

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
