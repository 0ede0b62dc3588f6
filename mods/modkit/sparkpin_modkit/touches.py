"""What modkit itself uses of vLLM, checked before ranks.py wraps anything; importing this imports nothing of vLLM."""

from __future__ import annotations

from sparkpin_modkit.checks import Touches

_STATE, _WRAPPER = "vllm.distributed.parallel_state", "vllm.v1.worker.worker_base:WorkerWrapperBase"

_TOUCHED: Touches = {
    "vllm:__version__": None,
    "vllm.logger:init_logger": "(name)",
    f"{_WRAPPER}.init_device": "self",
    f"{_WRAPPER}.initialize_from_config": "self, kv_cache_configs",
    f"{_STATE}:get_world_group": "()",
    f"{_STATE}:get_tp_group": "()",
    f"{_STATE}:GroupCoordinator.cpu_group": None,
    f"{_STATE}:GroupCoordinator.ranks": None,
    f"{_STATE}:GroupCoordinator.world_size": None,
    "vllm.config:VllmConfig.model_config": None,
    "vllm.config:ModelConfig.model": None,
}
TOUCHES: dict[str, Touches] = {"0.32.0": _TOUCHED, "0.33.0": _TOUCHED}
