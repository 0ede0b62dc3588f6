"""Give every LM head the INT8 method.

For the releases in touches.py. Wrapping ``ParallelLMHead.__init__`` catches the head whatever quantisation config chose
its method: under AutoRound (INC) it is ``UnquantizedLinearMethod``, elsewhere ``UnquantizedEmbeddingMethod``. May go
when vLLM can quantise an LM head on its own while it loads.
"""

from __future__ import annotations

import functools
from typing import Any

from sparkpin_modkit import ModError, UnsupportedPlatform, check_vllm, report, reporting_failure

from sparkpin_int8_lm_head import MOD, VERSION
from sparkpin_int8_lm_head.touches import TOUCHES


def install() -> None:
    """Wrap ``ParallelLMHead.__init__``."""
    check_vllm(TOUCHES)
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise UnsupportedPlatform(
            f"int8-lm-head has code for vLLM's CPU and CUDA platforms, this is {current_platform.device_type!r}: "
            "set SPARKPIN_MOD_INT8_LM_HEAD=0"
        )
    original = ParallelLMHead.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        from sparkpin_int8_lm_head.method import Int8LMHeadMethod

        original(self, *args, **kwargs)
        inner = self.quant_method
        if type(inner) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            report(MOD, "off", version=VERSION, head=type(inner).__name__)  # quantised already: vLLM's own computes it
            return
        with reporting_failure(MOD, version=VERSION):
            _refuse_lora()
            self.quant_method = Int8LMHeadMethod(inner)
            self.quant_method.mark_unloaded(self)

    ParallelLMHead.__init__ = init


def _refuse_lora() -> None:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None and config.lora_config is not None:
        raise ModError(
            "int8-lm-head: LoRA may change the LM head, which is quantised once at load; leave out --enable-lora or "
            "set SPARKPIN_MOD_INT8_LM_HEAD=0"
        )
