"""What the mod touches in each vLLM that it accepts; importing this imports nothing of vLLM."""

from __future__ import annotations

from sparkpin_modkit import Touches

_LAYERS = "vllm.model_executor.layers"
_HEAD = f"{_LAYERS}.vocab_parallel_embedding"
_METHOD = f"{_LAYERS}.quantization.base_config:QuantizeMethodBase"

_EVERYWHERE: Touches = {
    f"{_HEAD}:ParallelLMHead.tie_weights": "self, embed_tokens",
    f"{_HEAD}:ParallelLMHead.weight_loader": "(self, param, loaded_weight)",
    f"{_HEAD}:UnquantizedEmbeddingMethod.apply": "self, layer, x, bias",
    f"{_LAYERS}.linear:UnquantizedLinearMethod": None,
    f"{_METHOD}.create_weights": "self, layer, *weight_args, **extra_weight_attrs",
    f"{_METHOD}.process_weights_after_loading": "self, layer",
    f"{_METHOD}.apply": "self, layer, *args, **kwargs",
    "vllm.config:get_current_vllm_config_or_none": "()",
    "vllm.config:ModelConfig.hf_config": None,
    "vllm.config:VllmConfig.lora_config": None,
    "vllm.config:VllmConfig.model_config": None,
    "vllm.config:VllmConfig.speculative_config": None,
    "vllm.platforms:current_platform": None,
    "vllm.platforms.interface:Platform.is_cpu": "(self)",
    "vllm.platforms.interface:Platform.is_cuda": "(self)",
    "vllm.platforms.interface:Platform.device_type": None,
}
_NEWER: Touches = _EVERYWHERE | {"vllm.config:SpeculativeConfig.draft_sample_method": None}
_INIT = (
    "self, num_embeddings, embedding_dim, bias, params_dtype, org_num_embeddings, padding_size, quant_config, prefix"
)

# Their heads take another layer's weight without asking the quantisation method.
TIES_BY_ITSELF = ("0.19.1", "0.20.2")

TOUCHES: dict[str, Touches] = {
    "0.19.1": _EVERYWHERE | {f"{_HEAD}:ParallelLMHead.__init__": _INIT},
    "0.20.2": _EVERYWHERE | {f"{_HEAD}:ParallelLMHead.__init__": _INIT},
    "0.32.0": _NEWER | {f"{_HEAD}:ParallelLMHead.__init__": f"{_INIT}, disable_tp"},
    "0.33.0": _NEWER | {f"{_HEAD}:ParallelLMHead.__init__": f"{_INIT}, disable_tp, quant_method"},
}
REFUSED: dict[str, str] = {}
