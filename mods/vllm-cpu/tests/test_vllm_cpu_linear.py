"""GPTQ-packed linear layers through vLLM's real layer, with and without the operator of its own kernel."""

from __future__ import annotations

import pytest
import sparkpin_vllm_cpu
import torch
from sparkpin_vllm_cpu import linear
from test_vllm_cpu_experts import GROUP, gptq
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.inc import INCConfig
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

ROWS, COLUMNS = 96, 256


@pytest.fixture
def installed(world) -> None:
    sparkpin_vllm_cpu.register()


def layer_and_weight() -> tuple[ReplicatedLinear, torch.Tensor]:
    tensors, weight = gptq(ROWS, COLUMNS, seed=3)
    quant = INCConfig.from_config({"bits": 4, "group_size": GROUP, "sym": True, "data_type": "int"})
    layer = ReplicatedLinear(
        COLUMNS, ROWS, bias=False, params_dtype=torch.bfloat16, quant_config=quant, prefix="model.layers.0.mlp.up"
    )
    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, weight


def test_a_cpu_without_the_operator_gets_the_expanded_layer(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_int4_product", lambda: False)
    layer, weight = layer_and_weight()
    x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    y, _ = layer(x)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight), rtol=0, atol=0)


def test_this_cpu_computes_what_the_weights_stand_for(installed: None) -> None:
    """Whichever kernel is chosen here."""
    layer, weight = layer_and_weight()
    x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    y, _ = layer(x)
    wanted = torch.nn.functional.linear(x.float(), weight.float())
    assert (y.float() - wanted).norm() / wanted.norm() < 0.01


def test_the_other_kernel_is_chosen_where_it_works(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_int4_product", lambda: True)
    offered = kernels._POSSIBLE_KERNELS[PlatformEnum.CPU]
    assert offered[-1] is linear.ExpandedInt4LinearKernel
    shape = (COLUMNS, ROWS)
    config = kernels.MPLinearLayerConfig(shape, shape, scalar_types.uint4b8, torch.bfloat16, GROUP, zero_points=False)
    assert kernels.choose_mp_linear_kernel(config) is CPUWNA16LinearKernel
