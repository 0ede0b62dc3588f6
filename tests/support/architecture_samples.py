"""Small models of the architectures whose caches are known: few layers, the structure of the published ones.

A name -> config.json and arguments. As on a GB10: tests/support/vllm_as_gb10.py.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]
SIZES: Config = {
    "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 65_536, "intermediate_size": 128, "dtype": "bfloat16",
}  # fmt: skip
MOE: Config = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROUTED: Config = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
}  # fmt: skip
MLA = ROUTED | {
    "q_lora_rank": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
INDEXED = MLA | {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048}
GDN: Config = {
    "num_hidden_layers": 8, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "shared_expert_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
MAMBA2: Config = {
    "num_hidden_layers": 8, "head_dim": 64, "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128,
    "n_groups": 8, "conv_kernel": 4, "chunk_size": 64, "expand": 2, "mlp_hidden_act": "relu2", "use_conv_bias": True,
    "use_bias": False, "mamba_proj_bias": False, "layer_norm_epsilon": 1e-5, "attention_bias": False, "mlp_bias": False,
    "residual_in_fp32": False, "tie_word_embeddings": False,
}  # fmt: skip
GRANITE: Config = {
    "layer_types": ["mamba", "mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 128,
    "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 64, "mamba_conv_bias": True,
    "mamba_proj_bias": False, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 128,
    "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
    "attention_bias": False, "normalization_function": "rmsnorm",
}  # fmt: skip
JAMBA: Config = {
    "num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2,
    "expert_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_dt_rank": 8, "use_mamba_kernels": False,
}  # fmt: skip
GEMMA4: Config = {
    "head_dim": 64, "sliding_window": 512, "num_hidden_layers": 12, "global_head_dim": 128,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2, "enable_moe_block": False,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
}  # fmt: skip
GLM5: Config = ROUTED | {
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 512, "q_lora_rank": 64,
    "qk_rope_head_dim": 0, "v_head_dim": 256, "qk_nope_head_dim": 256, "linear_num_heads": 4, "linear_head_dim": 128,
    "index_n_heads": 32, "index_topk": 2048, "index_kpool": 16, "index_head_dim": 128, "linear_conv_kernel_dim": 4,
    "mhc": True, "mla_use_nope": True, "indexer_rope_interleave": False, "hc_eps": 1e-6,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
DEEPSEEK4: Config = ROUTED | {
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 64, "qk_rope_head_dim": 64,
    "o_groups": 2, "o_lora_rank": 32, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
    "compress_ratios": [0, 0, 4, 128, 4, 128], "sliding_window": 128, "num_hash_layers": 1, "hc_mult": 4,
    "hc_eps": 1e-6, "hc_sinkhorn_iters": 2, "swiglu_limit": 10.0, "compress_rope_theta": 160_000,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "expert_dtype": "fp8", "scoring_func": "sqrtsoftplus",
}  # fmt: skip
DEEPSEEK41: Config = ROUTED | {
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 64, "qk_rope_head_dim": 64,
    "o_groups": 2, "o_lora_rank": 32, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
    "num_hidden_layers": 8, "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1], "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 7], "candidate_source_layer_id": 5, "candidate_topk_blocks": 64,
    "candidate_block_size": 8, "sliding_window": 128, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 2,
    "swiglu_limit": 10.0, "compress_rope_theta": 160_000, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus", "engram_layer_ids": [], "model_type": "deepseek_v41_text",
    "rope_theta": 10_000, "rope_scaling": {
        "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
MINIMAX3: Config = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "num_local_experts": 4,
    "num_experts_per_tok": 2, "dense_intermediate_size": 64,
    "shared_intermediate_size": 64, "n_shared_experts": 1, "rope_theta": 10_000.0,
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 0, 0, 1, 1, 1], "use_sparse_attention": True, "sparse_index_dim": 128,
        "sparse_num_index_heads": 4, "sparse_topk_blocks": 16, "sparse_block_size": 128, "sparse_disable_index_value":
        [0, 0, 0, 1, 1, 1], "sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1,
    },
}  # fmt: skip
VISION3: Config = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14,
    "num_channels": 3, "image_size": 56, "layer_norm_eps": 1e-5, "hidden_act": "gelu", "attention_dropout": 0.0,
    "rope_theta": 10_000.0, "position_embedding_type": "rope",
    "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
}  # fmt: skip
QWEN4: Config = {
    "num_hidden_layers": 8, "head_dim": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": 64, "hc_count": 4, "hc_lowrank": 16, "ple_layer_ids": [1, 2, 3, 5, 6],
    "ple_embed_dim": 128,
    "ple_conv_kernel_size": 4, "ngram_size": 3, "ngram_vocab_size_base": 1000, "eos_token_id": 1, "indexer_n_heads": 4,
    "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 512, "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
FP8: Config = {"kv_cache_dtype": "fp8"}
PLAIN: Config = {"enable_prefix_caching": False}


def config(architecture: str, model_type: str, **changes: Any) -> Config:
    return SIZES | {"architectures": [architecture], "model_type": model_type} | changes


def with_vision(architecture: str, model_type: str, text: str, **changes: Any) -> Config:
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    return {
        "architectures": [architecture], "model_type": model_type, "dtype": "bfloat16", "vision_config": vision,
        "text_config": SIZES | {"model_type": text, "head_dim": 64} | changes,
    }  # fmt: skip


SAMPLES: dict[str, tuple[Config, Config]] = {
    "llama": (config("LlamaForCausalLM", "llama"), {}),
    "qwen2, its window off": (
        config("Qwen2ForCausalLM", "qwen2", use_sliding_window=False, sliding_window=4096, max_window_layers=3),
        {},
    ),
    "qwen3_moe fp8": (
        config("Qwen3MoeForCausalLM", "qwen3_moe", decoder_sparse_step=1, norm_topk_prob=True, **MOE),
        FP8,
    ),
    "qwen3": (config("Qwen3ForCausalLM", "qwen3", head_dim=64), {}),
    "qwen3_vl": (with_vision("Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text"), {}),
    "qwen3_vl_moe": (
        with_vision("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text", decoder_sparse_step=1,
                    norm_topk_prob=True, mlp_only_layers=[], **MOE),
        {},
    ),
    "glm4_moe": (config("Glm4MoeForCausalLM", "glm4_moe", head_dim=64, use_qk_norm=True, **ROUTED), {}),
    "minimax_m2": (
        config("MiniMaxM2ForCausalLM", "minimax_m2", head_dim=64, rotary_dim=32, use_qk_norm=True, **MOE,
               qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True),
        FP8,
    ),
    "seed_oss": (config("SeedOssForCausalLM", "seed_oss", head_dim=64), {}),
    "granite": (config("GraniteForCausalLM", "granite"), {}),
    "phi3": (
        config("Phi3ForCausalLM", "phi3", sliding_window=256, pad_token_id=0, bos_token_id=1, eos_token_id=2), {}
    ),
    "kimi_k2": (config("DeepseekV3ForCausalLM", "kimi_k2", **MLA), {}),
    "mistral": (config("MistralForCausalLM", "mistral", sliding_window=256), {}),
    "gpt_oss": (config("GptOssForCausalLM", "gpt_oss", head_dim=64, sliding_window=128, rope_scaling=None, **MOE), {}),
    "gemma3": (
        config("Gemma3ForCausalLM", "gemma3_text", sliding_window=512, layer_types=GEMMA4["layer_types"][:6]),
        {},
    ),
    "gemma4, pages alike": (
        config("Gemma4ForCausalLM", "gemma4_text", **GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True),
        {},
    ),
    "gemma4, pages of two sizes, layers that share": (
        config("Gemma4ForCausalLM", "gemma4_text", **GEMMA4)
        | {"num_kv_shared_layers": 6, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512,
           "num_global_key_value_heads": 1, "attention_k_eq_v": False},
        FP8,
    ),
    "laguna": (
        config("LagunaForCausalLM", "laguna", head_dim=64, num_hidden_layers=8, sliding_window=512,
               shared_expert_intermediate_size=64, **MOE,
               layer_types=(["full_attention"] + ["sliding_attention"] * 3) * 2),
        FP8,
    ),
    "glm4_moe_lite": (config("Glm4MoeLiteForCausalLM", "glm4_moe_lite", **MLA), {}),
    "deepseek_v3 fp8": (config("DeepseekV3ForCausalLM", "deepseek_v3", **MLA), FP8),
    "deepseek_v32": (config("DeepseekV32ForCausalLM", "deepseek_v32", **INDEXED), {}),
    "glm_moe_dsa": (config("GlmMoeDsaForCausalLM", "glm_moe_dsa", **INDEXED), FP8),
    "qwen3_next": (config("Qwen3NextForCausalLM", "qwen3_next", **GDN, **MOE), {}),
    "nemotron_h": (config("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="M-M*M-M*", **MAMBA2), {}),
    "nemotron_h, no prefix cache": (
        config("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="MMM*M-M*", **MAMBA2), PLAIN,
    ),
    "granitemoehybrid": (config("GraniteMoeHybridForCausalLM", "granitemoehybrid", **GRANITE), {}),
    "jamba": (config("JambaForCausalLM", "jamba", **JAMBA), {}),
    "glm5_next": (config("Glm5NextForCausalLM", "glm5_next_text", **GLM5), FP8),
    "glm5_next, as published": (
        config("Glm5NextForCausalLM", "glm5_next_text", **{
            key: value for key, value in GLM5.items() if not key.startswith("linear_")
        } | {
            "layer_types": (["linear_attention"] * 3 + ["deepseek_sparse_attention"]) * 2, "index_kpool": 4,
            "index_kpool_compress": True, "indexer_types": ["full"] * 8,
            "linear_attn_config": {"num_heads": 4, "head_dim": 128, "short_conv_kernel_size": 4},
        }),
        FP8,
    ),
    "minimax_m3": (
        {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
         "dtype": "bfloat16", "text_config": SIZES | MINIMAX3 | {"model_type": "minimax_m3_vl_text"},
         "vision_config": VISION3},
        FP8,
    ),
    "qwen4_exp": (config("Qwen4ExpForCausalLM", "qwen4_exp_text", **QWEN4, **MOE), FP8),
    "deepseek_v4": (config("DeepseekV4ForCausalLM", "deepseek_v4", **DEEPSEEK4), FP8),
    "deepseek_v41": (
        {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16",
         "text_config": SIZES | DEEPSEEK41, "vision_config": {}},
        FP8,
    ),
}  # fmt: skip
MTP: Config = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
DRAFTED = ("glm4_moe_lite", "deepseek_v32", "qwen3_next", "qwen4_exp", "deepseek_v4")
SAMPLES |= {
    f"{name}, MTP-3": (
        SAMPLES[name][0] | {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1},
        SAMPLES[name][1] | MTP,
    )
    for name in SAMPLES
    if name in DRAFTED
}
SAMPLES["nemotron_h, MTP-3"] = (
    SAMPLES["nemotron_h"][0] | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*"},
    MTP,
)
SAMPLES["minimax_m3, MTP-3"] = (
    SAMPLES["minimax_m3"][0] | {"text_config": SAMPLES["minimax_m3"][0]["text_config"] | {"num_mtp_modules": 1}},
    FP8 | MTP,
)
SAMPLES["glm5_next, MTP-3"] = (
    {"architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "dtype": "bfloat16",
     "text_config": SAMPLES["glm5_next"][0] | {"num_nextn_predict_layers": 1}},
    FP8 | MTP,
)  # fmt: skip
