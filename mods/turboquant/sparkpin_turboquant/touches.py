"""What the mod touches in each vLLM that it accepts; importing this imports nothing of vLLM."""

from __future__ import annotations

from sparkpin_modkit import Touches

_BACKEND = "vllm.v1.attention.backend"
_BACKENDS = "vllm.v1.attention.backends"
_REGISTRY = f"{_BACKENDS}.registry"
_CACHE = "vllm.v1.kv_cache_interface"
_PRESET = "vllm.model_executor.layers.quantization.turboquant.config:TurboQuantConfig"
_ATTENTION = "vllm.model_executor.layers.attention.attention"

_TOUCHED: Touches = {
    "vllm.platforms:current_platform": None,
    "vllm.platforms.interface:Platform.is_cpu": "(self)",
    "vllm.platforms.interface:Platform.is_cuda": "(self)",
    "vllm.platforms.interface:Platform.device_type": None,
    f"{_REGISTRY}:register_backend": "(backend, class_path)",
    f"{_REGISTRY}:AttentionBackendEnum.TURBOQUANT": None,
    f"{_BACKEND}:AttentionBackend.forward_includes_kv_cache_update": None,
    f"{_BACKEND}:AttentionBackend.supported_dtypes": None,
    f"{_BACKEND}:AttentionBackend.supported_kv_cache_dtypes": None,
    f"{_BACKEND}:AttentionBackend.get_name": "",
    f"{_BACKEND}:AttentionBackend.get_impl_cls": "",
    f"{_BACKEND}:AttentionBackend.get_builder_cls": "",
    f"{_BACKEND}:AttentionBackend.supports_attn_type": "attn_type",
    f"{_BACKEND}:AttentionBackend.supports_kv_cache_dtype": "kv_cache_dtype",
    f"{_BACKEND}:AttentionBackend.get_supported_head_sizes": "",
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
    f"{_ATTENTION}:unified_kv_cache_update": "key, value, layer_name",
    f"{_BACKEND}:AttentionType.DECODER": None,
    f"{_BACKEND}:MultipleOf": "(base)",
    **{
        f"{_BACKEND}:CommonAttentionMetadata.{field}": None
        for field in ("causal", "query_start_loc_cpu", "seq_lens", "block_table_tensor", "slot_mapping")
    },
    f"{_CACHE}:AttentionSpec.head_size": None,
    f"{_PRESET}.from_cache_dtype": "(cache_dtype, head_dim)",
    f"{_PRESET}.slot_size_aligned": None,
    "vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls": "selected_backend, attn_selector_config, num_heads",
    "vllm.v1.attention.selector:AttentionSelectorConfig.kv_cache_dtype": None,
    f"{_REGISTRY}:AttentionBackendEnum.get_path": "(self)",
    f"{_BACKEND}:AttentionBackend.get_supported_kernel_block_sizes": "kv_cache_spec",
    f"{_BACKEND}:AttentionBackend.supported_kv_cache_layouts": "",
    f"{_BACKEND}:AttentionBackend.customize_spec": "spec",
    f"{_CACHE}:KVCacheLayout.LBNHC": None,
    f"{_CACHE}:KVQuantMode.is_turboquant": None,
    **{f"{_CACHE}:AttentionSpec.{field}": None for field in ("kv_quant_mode", "state_content_bytes")},
}

_ON_CUDA: Touches = {
    f"{_BACKEND}:AttentionCGSupport.UNIFORM_BATCH": None,
    f"{_BACKEND}:AttentionMetadataBuilder.reorder_batch_threshold": None,
    f"{_BACKEND}:AttentionMetadataBuilder._init_reorder_batch_threshold": (
        "(self, reorder_batch_threshold, *, supports_spec_as_decode)"
    ),
    **{
        f"{_BACKEND}:CommonAttentionMetadata.{field}": None
        for field in ("query_start_loc", "max_query_len", "seq_lens_cpu_upper_bound")
    },
    f"{_BACKENDS}.utils:split_decodes_and_prefills": "(common_attn_metadata, *, decode_threshold)",
    f"{_BACKENDS}.fa_utils:is_fa_version_supported": "(fa_version)",
    f"{_BACKENDS}.fa_utils:get_flash_attn_version": "(*, head_size)",
    "vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func": (
        "(q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, softmax_scale, causal, return_softmax_lse, out, "
        "fa_version, cu_seqlens_k)"
    ),
    f"{_BACKEND}:AttentionBackend.supports_device_cpu_query_lens_mismatch": "",
}

TOUCHES: dict[str, Touches] = {"0.32.0": _TOUCHED, "0.33.0": _TOUCHED}
ON_CUDA: dict[str, Touches] = {"0.32.0": _ON_CUDA, "0.33.0": _ON_CUDA}
"""What is there on the CUDA platform only, or matters there only."""
