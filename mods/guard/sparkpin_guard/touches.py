"""What the guard reads in each release of vLLM; importing this imports nothing of vLLM."""

from __future__ import annotations

from sparkpin_modkit import Touches

_TOUCHED: Touches = {
    "vllm.config:VllmConfig.scheduler_config": None,
    "vllm.config:SchedulerConfig.max_num_seqs": None,
}
TOUCHES: dict[str, Touches] = {"0.32.0": _TOUCHED, "0.33.0": _TOUCHED}
