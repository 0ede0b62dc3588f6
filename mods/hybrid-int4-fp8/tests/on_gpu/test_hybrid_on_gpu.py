"""A scale that never came stops vLLM's own FP8 methods before they make it ready for a kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sparkpin_hybrid
import torch
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.utils.torch_utils import set_default_torch_dtype

sys.path.append(str(Path(__file__).parents[1]))

from inc_config import config_of

NAME = "model.layers.0.mlp.shared_expert.down_proj"
FP8 = {"bits": 8, "group_size": [128, 128], "sym": True, "data_type": "fp"}


@pytest.mark.parametrize("comes", [False, True])
def test_a_scale_that_never_came_stops(world, monkeypatch: pytest.MonkeyPatch, comes: bool) -> None:
    monkeypatch.setattr(world, "model_config", SimpleNamespace(dtype=torch.bfloat16, model=""))
    world.compilation_config.static_forward_context.clear()
    sparkpin_hybrid.register()
    quant = config_of({NAME: FP8})
    with torch.device("cuda"), set_default_torch_dtype(torch.bfloat16):
        layer = RowParallelLinear(256, 128, bias=False, quant_config=quant, prefix=NAME, params_dtype=torch.bfloat16)
    layer.weight.data.fill_(1)
    if comes:
        layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, torch.ones(1, 2))
        layer.quant_method.process_weights_after_loading(layer)
        assert bool(
            (layer.quant_method.apply(layer, torch.ones(1, 256, dtype=torch.bfloat16, device="cuda")) == 256).all()
        )
    else:
        with pytest.raises(ValueError, match=f"{NAME}.weight_scale_inv"):
            layer.quant_method.process_weights_after_loading(layer)
