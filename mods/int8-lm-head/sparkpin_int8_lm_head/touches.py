"""What the mod touches in each vLLM that it accepts; importing this imports nothing of vLLM."""

from __future__ import annotations

from sparkpin_modkit import Touches

_LAYERS = "vllm.model_executor.layers"
_HEAD = f"{_LAYERS}.vocab_parallel_embedding"
_METHOD = f"{_LAYERS}.quantization.base_config:QuantizeMethodBase"

_TOUCHED: Touches = {
    f"{_HEAD}:ParallelLMHead.tie_weights": "self, embed_tokens",
    f"{_HEAD}:UnquantizedEmbeddingMethod.apply": "self, layer, x, bias",
    f"{_LAYERS}.linear:UnquantizedLinearMethod": None,
    f"{_METHOD}.create_weights": "self, layer, *weight_args, **extra_weight_attrs",
    f"{_METHOD}.process_weights_after_loading": "self, layer",
    f"{_METHOD}.apply": "self, layer, *args, **kwargs",
    "vllm.config:get_current_vllm_config_or_none": "()",
    "vllm.config:SpeculativeConfig.draft_sample_method": None,
    "vllm.config:VllmConfig.lora_config": None,
    "vllm.config:VllmConfig.speculative_config": None,
    "vllm.platforms:current_platform": None,
    "vllm.platforms.interface:Platform.is_cpu": "(self)",
    "vllm.platforms.interface:Platform.is_cuda": "(self)",
    "vllm.platforms.interface:Platform.device_type": None,
}
_INIT = (
    "self, num_embeddings, embedding_dim, bias, params_dtype, org_num_embeddings, padding_size, quant_config, prefix"
)

TOUCHES: dict[str, Touches] = {
    "0.32.0": _TOUCHED | {f"{_HEAD}:ParallelLMHead.__init__": f"{_INIT}, disable_tp"},
    "0.33.0": _TOUCHED | {f"{_HEAD}:ParallelLMHead.__init__": f"{_INIT}, disable_tp, quant_method"},
}
