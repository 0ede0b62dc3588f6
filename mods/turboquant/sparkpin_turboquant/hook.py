"""Give vLLM's CPU platform an attention backend for ``--kv-cache-dtype turboquant_4bit_nc``.

For vLLM 0.32.0, which accepts that option on a CPU and then serves wrong text: its CPU backend ignores the cache's
type. The backend takes the registry's name TURBOQUANT; any other cache type gets what vLLM itself would choose.
"""

from __future__ import annotations

from typing import Any

from sparkpin_modkit import UnsupportedPlatform, check_signature, require_vllm

VLLM_VERSIONS = ("0.32.0",)
CACHE_DTYPE = "turboquant_4bit_nc"
BACKEND = "sparkpin_turboquant.backend.TurboQuantBackend"


def install() -> None:
    """Register the backend and wrap ``CpuPlatform.get_attn_backend_cls``."""
    require_vllm(VLLM_VERSIONS)
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise UnsupportedPlatform(
            f"turboquant runs on vLLM's CPU platform only, this is {current_platform.device_type!r}: "
            "the kernel arrives with a later release; set SPARKPIN_MOD_TURBOQUANT=0"
        )
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    original = CpuPlatform.get_attn_backend_cls
    check_signature(original, "selected_backend, attn_selector_config, num_heads")
    check_signature(register_backend, "backend, class_path, is_mamba")
    check_signature(AttentionBackend.customize_spec, "spec")
    check_signature(AttentionMetadataBuilder.__init__, "self, kv_cache_spec, layer_names, vllm_config, device")
    check_signature(AttentionMetadataBuilder.build, "self, common_prefix_len, common_attn_metadata, fast_build")
    check_signature(
        AttentionImpl.forward,
        "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale",
    )

    def get_attn_backend_cls(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        dtype = attn_selector_config.kv_cache_dtype
        if dtype is None or not dtype.startswith("turboquant_"):
            return str(original.__func__(cls, selected_backend, attn_selector_config, num_heads))
        if dtype != CACHE_DTYPE:
            raise UnsupportedPlatform(f"--kv-cache-dtype {dtype}: on a CPU this mod has {CACHE_DTYPE} only")
        return str(AttentionBackendEnum.TURBOQUANT.get_path())

    register_backend(AttentionBackendEnum.TURBOQUANT, BACKEND)
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
