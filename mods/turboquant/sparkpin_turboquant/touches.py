"""What the mod touches in each vLLM that it accepts; importing this imports nothing of vLLM."""

from __future__ import annotations

from sparkpin_modkit import Touches

_BACKEND = "vllm.v1.attention.backend"
_REGISTRY = "vllm.v1.attention.backends.registry"
_CACHE = "vllm.v1.kv_cache_interface"
_PRESET = "vllm.model_executor.layers.quantization.turboquant.config:TurboQuantConfig"

_SINCE_0_32: Touches = {
    "vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls": "selected_backend, attn_selector_config, num_heads",
    "vllm.platforms:current_platform": None,
    "vllm.platforms.interface:Platform.is_cpu": "self",
    "vllm.platforms.interface:Platform.device_type": None,
    "vllm.v1.attention.selector:AttentionSelectorConfig.kv_cache_dtype": None,
    f"{_REGISTRY}:register_backend": "backend, class_path, is_mamba",
    f"{_REGISTRY}:AttentionBackendEnum.TURBOQUANT": None,
    f"{_REGISTRY}:AttentionBackendEnum.get_path": "self, include_classname",
    f"{_BACKEND}:AttentionBackend.forward_includes_kv_cache_update": None,
    f"{_BACKEND}:AttentionBackend.supported_dtypes": None,
    f"{_BACKEND}:AttentionBackend.supported_kv_cache_dtypes": None,
    f"{_BACKEND}:AttentionBackend.get_name": "",
    f"{_BACKEND}:AttentionBackend.get_impl_cls": "",
    f"{_BACKEND}:AttentionBackend.get_builder_cls": "",
    f"{_BACKEND}:AttentionBackend.get_supported_kernel_block_sizes": "kv_cache_spec",
    f"{_BACKEND}:AttentionBackend.supported_kv_cache_layouts": "",
    f"{_BACKEND}:AttentionBackend.customize_spec": "spec",
    f"{_BACKEND}:AttentionBackend.supports_attn_type": "attn_type",
    f"{_BACKEND}:AttentionMetadataBuilder.__init__": "self, kv_cache_spec, layer_names, vllm_config, device",
    f"{_BACKEND}:AttentionMetadataBuilder.build": "self, common_prefix_len, common_attn_metadata, fast_build",
    f"{_BACKEND}:AttentionImpl.__init__": (
        "self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, "
        "logits_soft_cap, attn_type, kv_sharing_target_layer_name"
    ),
    f"{_BACKEND}:AttentionImpl.forward": (
        "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale"
    ),
    # The one that calls the implementation's do_kv_cache_update.
    "vllm.model_executor.layers.attention.attention:unified_kv_cache_update": "key, value, layer_name",
    f"{_BACKEND}:AttentionType.DECODER": None,
    f"{_BACKEND}:MultipleOf": "base",
    **{
        f"{_BACKEND}:CommonAttentionMetadata.{field}": None
        for field in ("causal", "query_start_loc_cpu", "seq_lens", "block_table_tensor", "slot_mapping")
    },
    f"{_CACHE}:KVCacheLayout.LBNHC": None,
    f"{_CACHE}:KVQuantMode.is_turboquant": None,
    **{f"{_CACHE}:AttentionSpec.{field}": None for field in ("head_size", "kv_quant_mode", "state_content_bytes")},
    f"{_PRESET}.from_cache_dtype": "cache_dtype, head_dim",
    f"{_PRESET}.slot_size_aligned": None,
}

TOUCHES: dict[str, Touches] = {"0.32.0": _SINCE_0_32, "0.33.0": _SINCE_0_32}
REFUSED = {
    "0.19.1": "it has no cache of this type; set SPARKPIN_MOD_TURBOQUANT=0",
    "0.20.2": "its attention backends describe the cache's shape and layout in another way, for which this mod has no "
    "code; set SPARKPIN_MOD_TURBOQUANT=0",
}
