"""What the mod touches in each vLLM that it accepts; importing this imports nothing of vLLM."""

from __future__ import annotations

from sparkpin_modkit import Touches

_LAYERS = "vllm.model_executor.layers"
_HEAD = f"{_LAYERS}.vocab_parallel_embedding"
_SHARD = f"{_HEAD}:VocabParallelEmbeddingShardIndices"
_SPECULATIVE = "vllm.config:SpeculativeConfig"

_TOUCHED: Touches = {
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model": "self, target_model",
    "vllm.model_executor.models.interfaces:LocalArgmaxMixin.get_top_tokens": "self, hidden_states",
    # What get_top_tokens calls with the list's rows in the place of a head.
    f"{_LAYERS}.logits_processor:LogitsProcessor.get_top_tokens": "self, lm_head, hidden_states, embedding_bias",
    f"{_LAYERS}.logits_processor:LogitsProcessor._apply_head": "self, lm_head, hidden_states, embedding_bias",
    f"{_HEAD}:UnquantizedEmbeddingMethod.apply": "self, layer, x, bias",
    f"{_LAYERS}.linear:UnquantizedLinearMethod.apply": "self, layer, x, bias",
    _SHARD: (
        "padded_org_vocab_start_index, padded_org_vocab_end_index, padded_added_vocab_start_index, "
        "padded_added_vocab_end_index, org_vocab_start_index, org_vocab_end_index, added_vocab_start_index, "
        "added_vocab_end_index"
    ),
    f"{_SHARD}.num_org_vocab_padding": None,
    f"{_SHARD}.org_vocab_start_index": None,
    "vllm.config:VllmConfig.additional_config": None,
    "vllm.config:VllmConfig.model_config": None,
    "vllm.config:VllmConfig.speculative_config": None,
    "vllm.config:ModelConfig.model": None,
    "vllm.config:ModelConfig.tokenizer": None,
    "vllm.config:ModelConfig.skip_tokenizer_init": None,
    f"{_SPECULATIVE}.draft_sample_method": None,
    f"{_SPECULATIVE}.use_local_argmax_reduction": None,
    "vllm.platforms:current_platform": None,
    "vllm.platforms.interface:Platform.is_cpu": "(self)",
    "vllm.platforms.interface:Platform.is_cuda": "(self)",
    "vllm.platforms.interface:Platform.device_type": None,
}
_ON_CUDA: Touches = {
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model": "self, target_model",
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.get_draft_top_tokens": (
        "self, hidden_states, spec_step_idx"
    ),
}

GDN = f"{_LAYERS}.mamba.gdn.qwen_gdn_linear_attn"
PORT = "vllm.third_party.flash_linear_attention.ops.fused_gdn_decode_post_conv_mtp"
STATES: Touches = {  # states.py, for 0.33
    f"{GDN}:FUSED_GDN_STATE_DTYPES": None,
    f"{GDN}:fused_mtp_decode_impl": "",
    "vllm.config:VllmConfig.cache_config": None,
    "vllm.config:CacheConfig.mamba_ssm_cache_dtype": None,
    f"{PORT}:fused_gdn_decode_post_conv_mtp_triton": (
        "mixed_qkv, a, b, A_log, dt_bias, state_indices, cu_seqlens, num_accepted_tokens, state, output_gate, "
        "norm_weight, out, scale, norm_eps, output_gate_activation"
    ),
}

TOUCHES: dict[str, Touches] = {"0.32.0": _TOUCHED, "0.33.0": _TOUCHED}
STATES_IN = ("0.33.0",)  # those in which states.py has two kernels to choose from
ON_CUDA: dict[str, Touches] = {"0.32.0": _ON_CUDA, "0.33.0": {**_ON_CUDA, **STATES}}
"""The model runner that is the usual one on GPUs; the other one there is the CPU's, too."""
