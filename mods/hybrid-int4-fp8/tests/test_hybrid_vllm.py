"""Through vLLM's real config, layers and weight loaders."""

from __future__ import annotations

import pytest
import sparkpin_hybrid
import torch
from sparkpin_hybrid import hook
from sparkpin_hybrid.count import LayerCount
from sparkpin_modkit import SignatureChanged, plugin
from sparkpin_modkit.testing import parse_reports, single_process_vllm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.inc import INCConfig

FP8 = {"bits": 8, "group_size": [128, 128], "sym": True, "data_type": "fp"}
SHARED = "model.layers.0.mlp.shared_expert"


@pytest.fixture(scope="module")
def world():
    with single_process_vllm() as config:
        yield config


@pytest.fixture
def pristine(monkeypatch: pytest.MonkeyPatch):
    original = INCConfig.get_quant_method
    original = getattr(original, "__wrapped__", original)
    monkeypatch.setattr(INCConfig, "get_quant_method", original)
    monkeypatch.setattr(plugin, "_installed", set())
    monkeypatch.setattr(hook, "COUNT", LayerCount())
    monkeypatch.delenv("SPARKPIN_MOD_HYBRID_INT4_FP8", raising=False)
    return original


@pytest.fixture
def installed(pristine, world):
    sparkpin_hybrid.register()
    return world


def config(**extra: dict[str, object]) -> INCConfig:
    out = INCConfig.from_config(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "data_type": "int",
            "packing_format": "auto_round:auto_gptq",
            "block_name_to_quantize": "model.layers",
            "extra_config": {f"{SHARED}.{name}": entry for name, entry in extra.items()},
        }
    )
    out.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    return out


def fp8_tensors(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(rows // 128, columns // 128, generator=generator) + 0.1
    exact = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight, scale, exact.to(torch.bfloat16)


def test_off_leaves_vllm_alone(pristine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKPIN_MOD_HYBRID_INT4_FP8", "0")
    sparkpin_hybrid.register()
    assert INCConfig.get_quant_method is pristine


def test_changed_signature_stops(pristine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(INCConfig, "get_quant_method", lambda self, layer: None)
    with pytest.raises(SystemExit) as caught:
        sparkpin_hybrid.register()
    assert isinstance(caught.value.__cause__, SignatureChanged)


def test_fused_and_single_layer_load_and_compute(installed, caplog, capfd) -> None:
    quant = config(gate_proj=FP8, up_proj=FP8, down_proj=FP8)
    fused = MergedColumnParallelLinear(
        128, [256, 256], bias=False, quant_config=quant, prefix=f"{SHARED}.gate_up_proj", params_dtype=torch.bfloat16
    )
    down = RowParallelLinear(
        256, 128, bias=False, quant_config=quant, prefix=f"{SHARED}.down_proj", params_dtype=torch.bfloat16
    )
    exact = []
    for shard in (0, 1):
        weight, scale, value = fp8_tensors(256, 128, seed=shard)
        fused.weight.weight_loader(fused.weight, weight, shard)
        fused.weight_scale_inv.weight_loader(fused.weight_scale_inv, scale, shard)
        exact.append(value)
    weight, scale, down_exact = fp8_tensors(128, 256, seed=2)
    down.weight.weight_loader(down.weight, weight)
    down.weight_scale_inv.weight_loader(down.weight_scale_inv, scale)

    fused.quant_method.process_weights_after_loading(fused)
    assert (hook.COUNT.dispatched, hook.COUNT.loaded) == (2, 1)
    down.quant_method.process_weights_after_loading(down)
    assert (hook.COUNT.dispatched, hook.COUNT.loaded) == (2, 2)

    # Compared through the layer, whose CPU form may have packed the weight away: unit vectors read it back exactly.
    eye = torch.eye(128, dtype=torch.bfloat16)
    assert torch.equal(fused.quant_method.apply(fused, eye).T, torch.cat(exact))
    assert torch.equal(down.quant_method.apply(down, torch.eye(256, dtype=torch.bfloat16)).T, down_exact)


def test_active_is_reported_once_all_layers_have_weights(installed, monkeypatch, capfd) -> None:
    monkeypatch.setattr("sparkpin_modkit.reports._vllm_logger", lambda: None)
    quant = config(down_proj=FP8)
    layers = [
        RowParallelLinear(
            128, 128, bias=False, quant_config=quant, prefix=f"{SHARED}.down_proj", params_dtype=torch.bfloat16
        )
        for _ in range(2)
    ]
    for i, layer in enumerate(layers):
        weight, scale, _ = fp8_tensors(128, 128, seed=i)
        layer.weight.weight_loader(layer.weight, weight)
        layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scale)
        assert parse_reports(capfd.readouterr().err) == []
        layer.quant_method.process_weights_after_loading(layer)
    [line] = parse_reports(capfd.readouterr().err)
    assert (line["event"], line["fp8_layers"]) == ("active", 2)


def test_scales_that_never_came_raise(installed) -> None:
    layer = RowParallelLinear(
        128,
        128,
        bias=False,
        quant_config=config(down_proj=FP8),
        prefix=f"{SHARED}.down_proj",
        params_dtype=torch.bfloat16,
    )
    with pytest.raises(ValueError, match=rf"{SHARED}.down_proj.weight_scale_inv: the checkpoint left scales unset"):
        layer.quant_method.process_weights_after_loading(layer)


def test_other_layers_get_what_vllm_gives(installed) -> None:
    quant = config(down_proj={"bits": 16, "data_type": "float"})
    layer = RowParallelLinear(
        128, 128, bias=False, quant_config=quant, prefix=f"{SHARED}.down_proj", params_dtype=torch.bfloat16
    )
    assert isinstance(layer.quant_method, UnquantizedLinearMethod)
    assert hook.COUNT.dispatched == 0


def test_inconsistent_fused_layer_stops_loading(installed) -> None:
    quant = config(gate_proj=FP8, up_proj={"bits": 16, "data_type": "float"})
    with pytest.raises(ValueError, match="one fused layer"):
        MergedColumnParallelLinear(128, [128, 128], bias=False, quant_config=quant, prefix=f"{SHARED}.gate_up_proj")


def test_parts_that_split_a_block_are_refused(installed) -> None:
    quant = config(gate_proj=FP8, up_proj=FP8)
    with pytest.raises(ValueError, match="not divisible by"):
        MergedColumnParallelLinear(128, [64, 128], bias=False, quant_config=quant, prefix=f"{SHARED}.gate_up_proj")
