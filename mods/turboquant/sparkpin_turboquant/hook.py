"""Give vLLM's CPU platform an attention backend for ``--kv-cache-dtype turboquant_*``.

For the releases in touches.py. On a CPU vLLM 0.32.0 accepts that option and then serves wrong text, as its CPU backend
ignores the cache's type; 0.33.0 refuses it. The backend takes the registry's name TURBOQUANT; any other cache type gets
what vLLM itself would choose.
"""

from __future__ import annotations

from typing import Any

from sparkpin_modkit import UnsupportedPlatform, check_vllm

from sparkpin_turboquant.formats import resolve
from sparkpin_turboquant.touches import REFUSED, TOUCHES

BACKEND = "sparkpin_turboquant.backend.TurboQuantBackend"


def install() -> None:
    """Register the backend and wrap ``CpuPlatform.get_attn_backend_cls``."""
    check_vllm(TOUCHES, REFUSED)
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise UnsupportedPlatform(
            f"turboquant runs on vLLM's CPU platform only, this is {current_platform.device_type!r}: "
            "no backend of vLLM uses its GPU kernels yet; set SPARKPIN_MOD_TURBOQUANT=0"
        )
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    original = CpuPlatform.get_attn_backend_cls

    def get_attn_backend_cls(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        dtype = attn_selector_config.kv_cache_dtype
        if dtype is None or not dtype.startswith("turboquant"):
            return str(original.__func__(cls, selected_backend, attn_selector_config, num_heads))
        resolve(dtype)
        return str(AttentionBackendEnum.TURBOQUANT.get_path())

    register_backend(AttentionBackendEnum.TURBOQUANT, BACKEND)
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
