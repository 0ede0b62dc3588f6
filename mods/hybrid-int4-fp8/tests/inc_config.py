"""A checkpoint's quantisation config, as vLLM reads it, for tests on a CPU and on a GPU."""

from __future__ import annotations

from vllm.model_executor.layers.quantization.inc import INCConfig


def config_of(extra: dict[str, dict[str, object]]) -> INCConfig:
    """INT4 of the layers, but for those that `extra` names."""
    return INCConfig.from_config(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "data_type": "int",
            "packing_format": "auto_round:auto_gptq",
            "block_name_to_quantize": "model.language_model.layers",
            "extra_config": extra,
        }
    )
