"""vLLM's Triton step over float16 states, as CUDA gets it: against float64, beside its CUDA kernel with the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparkpin_draft_vocabulary import hook
from sparkpin_draft_vocabulary.selfcheck import ROUNDED, ROUNDING, case, check, error, exact

USERS = ((3, 1, 2, 3) * 4, (3, 1, 2, 1) * 4)


@pytest.fixture(scope="module")
def layer() -> Any:
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

    hook.install()
    return qwen_gdn_linear_attn


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize("kind", ROUNDING, ids=str)
@pytest.mark.parametrize(
    ("tokens", "accepted"), [((3,), (1,)), ((3, 3, 3), (1, 2, 3)), ((3, 1, 2, 3, 3), (3, 1, 2, 1, 3)), USERS]
)
def test_a_step_with_drafts(
    layer: Any, kind: torch.dtype, tokens: tuple[int, ...], accepted: tuple[int, ...], packed: bool
) -> None:
    assert kind in layer.FUSED_GDN_STATE_DTYPES
    given = case(kind, tokens, accepted, packed)
    out, state = exact(given)
    layer.fused_mtp_decode_impl()(**given)
    torch.cuda.synchronize()
    assert error(given["out"], out) < ROUNDED
    assert error(given["state"], state) < ROUNDING[kind]


def test_the_self_check_passes() -> None:
    assert [found < bound for _, _, found, bound in check()] == [True, True]
