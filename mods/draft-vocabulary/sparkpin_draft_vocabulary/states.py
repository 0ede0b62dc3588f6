"""A step that checks drafts over GDN states in float16, in two kernels instead of ten a layer: vLLM's own, of another
platform.

vLLM 0.33 has this step in CUDA for states in float32 and bfloat16 (`fused_gdn_decode_post_conv_mtp`), and the same in
Triton, which takes any and which it uses on ROCm alone. For float16 on CUDA it takes neither, but copies, joins and
fills around the recurrent kernel. May go when `FUSED_GDN_STATE_DTYPES` has float16.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from sparkpin_draft_vocabulary.touches import GDN


def install() -> None:
    """Once a process. For CUDA and the releases of `touches.STATES`; its caller has checked both."""
    import torch
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import FUSED_GDN_STATE_DTYPES, fused_mtp_decode_impl
    from vllm.third_party.flash_linear_attention.ops.fused_gdn_decode_post_conv_mtp import (
        fused_gdn_decode_post_conv_mtp_triton,
    )

    layer: Any = sys.modules[GDN]  # where its layers look both of them up, in each step
    layer.FUSED_GDN_STATE_DTYPES = (*FUSED_GDN_STATE_DTYPES, torch.float16)
    layer.fused_mtp_decode_impl = chosen(fused_mtp_decode_impl, fused_gdn_decode_post_conv_mtp_triton, torch.float16)


def check(config: Any) -> None:
    """Compare the port at this machine's first start, where this server's states are of the type that it takes.

    Raises ModError where it is wrong."""
    import torch
    from sparkpin_modkit.selfcheck import once

    from sparkpin_draft_vocabulary import MOD, VERSION, selfcheck

    taken = getattr(sys.modules.get(GDN), "FUSED_GDN_STATE_DTYPES", ())
    if torch.float16 in taken and config.cache_config.mamba_ssm_cache_dtype == "float16":
        once(MOD, VERSION, {"states": "float16"}, selfcheck.check)
        torch.cuda.empty_cache()  # before vLLM measures what is left


def chosen(original: Any, port: Any, other: Any) -> Any:
    """port: what takes states of the type `other`; all others go where they went."""

    @functools.wraps(original)
    def fused_mtp_decode_impl() -> Any:
        own = original()

        def fused(*, state: Any, **rest: Any) -> Any:
            return (port if state.dtype == other else own)(state=state, **rest)

        return fused

    return fused_mtp_decode_impl
