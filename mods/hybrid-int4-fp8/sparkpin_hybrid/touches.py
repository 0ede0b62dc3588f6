"""What the mod touches in each vLLM that it accepts; importing this imports nothing of vLLM."""

from __future__ import annotations

from sparkpin_modkit import Touches

_LAYERS = "vllm.model_executor.layers"
_INC = f"{_LAYERS}.quantization.inc"
_FP8 = f"{_LAYERS}.quantization.fp8"
_CREATE = (
    "self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype, "
    "**extra_weight_attrs"
)
_CREATE_EXPERTS = (
    "self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs"
)

_TOUCHED: Touches = {
    f"{_INC}:INCConfig.get_quant_method": "self, layer, prefix",
    f"{_LAYERS}.linear:LinearBase": None,
    "vllm.config:get_current_vllm_config_or_none": "()",
    "vllm.config:VllmConfig.model_config": None,
    "vllm.config:ModelConfig.model": None,
    "vllm.platforms:current_platform": None,
    "vllm.platforms.interface:Platform.is_cpu": "(self)",
    f"{_LAYERS}.fused_moe:RoutedExperts": None,
    f"{_FP8}:Fp8Config": "(*, is_checkpoint_fp8_serialized, activation_scheme, weight_block_size)",
    f"{_FP8}:Fp8MoEMethod": "(quant_config, layer)",
    f"{_INC}.inc_linear:INCLinearMethod": "(scheme)",
    f"{_INC}.schemes.inc_fp8_linear:INCFp8LinearScheme": "(prefix, weight_block_size)",
    f"{_INC}.schemes.inc_scheme:INCLinearScheme.get_min_capability": "",
    f"{_INC}.schemes.inc_scheme:INCLinearScheme.create_weights": _CREATE,
    f"{_INC}.schemes.inc_scheme:INCLinearScheme.process_weights_after_loading": "self, layer",
    f"{_INC}.schemes.inc_scheme:INCLinearScheme.apply_weights": "self, layer, x, bias",
    f"{_LAYERS}.linear:UnquantizedLinearMethod.process_weights_after_loading": "(self, layer)",
    f"{_LAYERS}.linear:UnquantizedLinearMethod.apply": "(self, layer, x, bias)",
    f"{_LAYERS}.fused_moe:UnquantizedFusedMoEMethod": "moe",
    f"{_LAYERS}.fused_moe:UnquantizedFusedMoEMethod.create_weights": _CREATE_EXPERTS,
    f"{_LAYERS}.fused_moe:UnquantizedFusedMoEMethod.process_weights_after_loading": "self, layer",
    f"{_LAYERS}.fused_moe:FusedMoeWeightScaleSupported.BLOCK": None,
    f"{_LAYERS}.quantization.utils.fp8_utils:create_fp8_scale_parameter": (
        "(parameter_type, output_partition_sizes, input_size_per_partition, block_size, weight_loader)"
    ),
    f"{_LAYERS}.quantization.utils.fp8_utils:create_fp8_weight_parameter": (
        "(output_size_per_partition, input_size_per_partition, weight_loader)"
    ),
    f"{_LAYERS}.quantization.utils.fp8_utils:validate_fp8_block_shape": (
        "(layer, input_size, output_size, input_size_per_partition, output_partition_sizes, block_size)"
    ),
    "vllm.model_executor.parameter:BlockQuantScaleParameter": None,
    "vllm.model_executor.utils:set_weight_attrs": "(weight, weight_attrs)",
}

TOUCHES: dict[str, Touches] = {"0.32.0": _TOUCHED, "0.33.0": _TOUCHED}
