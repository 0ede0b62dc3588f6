"""The forms for vLLM 0.19.1 and 0.20.2, on their real Python code. Not collected in an image: its vLLM is a later one.

Run by the project's test_mods_on_vllm.py. There is no GPU: the platform only says that it is no CPU, and the
choice of a kernel, which needs one, is left out; all else is vLLM's.
"""

from __future__ import annotations

import pytest
import sparkpin_hybrid
import torch
from sparkpin_hybrid import hook
from sparkpin_hybrid.count import LayerCount
from sparkpin_hybrid.touches import BEFORE_SCHEMES
from sparkpin_modkit import UnsupportedPlatform, plugin
from sparkpin_modkit.testing import parse_reports
from vllm import __version__
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.inc import INCConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.utils import configure_quant_config
from vllm.model_executor.models.qwen3_5 import Qwen3_5MoeForConditionalGeneration
from vllm.platforms import current_platform

FP8 = {"bits": 8, "group_size": [128, 128], "sym": True, "data_type": "fp"}
FULL = {"bits": 16, "data_type": "float"}
SAVED = "model.language_model.layers.3.mlp"
BUILT = "language_model.model.layers.3.mlp"


def test_this_is_such_a_vllm() -> None:
    assert __version__.partition("+")[0] in BEFORE_SCHEMES


@pytest.fixture
def installed(world, monkeypatch: pytest.MonkeyPatch, unregistered: None):
    original = INCConfig.get_quant_method
    monkeypatch.setattr(INCConfig, "get_quant_method", getattr(original, "__wrapped__", original))
    monkeypatch.setattr(hook, "COUNT", LayerCount())
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: NoKernel())
    monkeypatch.setattr(fp8, "select_fp8_moe_backend", lambda **_: (None, None))
    monkeypatch.setattr(world, "model_config", type("Config", (), {"dtype": torch.bfloat16})(), raising=False)
    sparkpin_hybrid.register()


class NoKernel:
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass


def configured(extra: dict[str, dict[str, object]]) -> INCConfig:
    config = INCConfig.from_config(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
            "block_name_to_quantize": "model.language_model.layers",
            "extra_config": extra,
        }
    )
    configure_quant_config(config, Qwen3_5MoeForConditionalGeneration)
    return config


def tensors(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    return weight, torch.rand(rows // 128, columns // 128, generator=generator) + 0.1


def test_a_fused_layer_gets_block_fp8_and_its_tensors(installed, monkeypatch, capfd) -> None:
    monkeypatch.setattr("sparkpin_modkit.reports._vllm_logger", lambda: None)
    quant = configured({f"{SAVED}.shared_expert.{part}_proj": FP8 for part in ("gate", "up")})
    layer = MergedColumnParallelLinear(
        128,
        [256, 256],
        bias=False,
        quant_config=quant,
        prefix=f"{BUILT}.shared_expert.gate_up_proj",
        params_dtype=torch.bfloat16,
    )
    assert type(layer.quant_method) is fp8.Fp8LinearMethod
    assert (layer.quant_method.block_quant, layer.quant_method.act_q_static) == (True, False)
    for shard in (0, 1):
        weight, scale = tensors(256, 128, shard)
        layer.weight.weight_loader(layer.weight, weight, shard)
        layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scale, shard)
        assert torch.equal(layer.weight.data[256 * shard :][:256].float(), weight.float())
        assert torch.equal(layer.weight_scale_inv.data[2 * shard :][:2], scale)
    assert parse_reports(capfd.readouterr().err) == []
    layer.quant_method.process_weights_after_loading(layer)
    [line] = parse_reports(capfd.readouterr().err)
    assert (line["event"], line["fp8_layers"], line["path"]) == ("active", 1, "vLLM block FP8")


def test_attention_gets_block_fp8(installed) -> None:
    names = [f"model.language_model.layers.3.self_attn.{part}_proj" for part in "qkv"]
    layer = QKVParallelLinear(
        256,
        64,
        8,
        2,
        bias=False,
        quant_config=configured(dict.fromkeys(names, FP8)),
        prefix="language_model.model.layers.3.self_attn.qkv_proj",
        params_dtype=torch.bfloat16,
    )
    for shard, rows in (("q", 512), ("k", 128), ("v", 128)):
        weight, scale = tensors(rows, 256, len(shard))
        layer.weight.weight_loader(layer.weight, weight, shard)
        layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scale, shard)
    assert layer.weight.dtype == torch.float8_e4m3fn
    assert layer.weight_scale_inv.shape == (6, 2)


def test_experts_get_block_fp8(installed) -> None:
    names = [f"{SAVED}.experts.{e}.{part}_proj" for e in range(3) for part in ("gate", "up", "down")]
    layer = FusedMoE(
        num_experts=3,
        top_k=2,
        hidden_size=256,
        intermediate_size=128,
        params_dtype=torch.bfloat16,
        quant_config=configured(dict.fromkeys(names, FP8)),
        prefix=f"{BUILT}.experts",
    )
    assert type(layer.quant_method) is fp8.Fp8MoEMethod
    assert layer.w13_weight.dtype == layer.w2_weight.dtype == torch.float8_e4m3fn
    for shard, rows, columns, name in (("w1", 128, 256, "w13"), ("w3", 128, 256, "w13"), ("w2", 256, 128, "w2")):
        for expert in range(3):
            weight, scale = tensors(rows, columns, expert)
            for suffix, tensor in (("weight", weight), ("weight_scale_inv", scale)):
                parameter = getattr(layer, f"{name}_{suffix}")
                parameter.weight_loader(parameter, tensor, f"experts.{name}_{suffix}", shard, expert)
    assert torch.equal(layer.w2_weight_scale_inv.data[2], tensors(256, 128, 2)[1])
    assert torch.equal(layer.w13_weight.data[1, 128:].float(), tensors(128, 256, 1)[0].float())


def test_other_layers_get_what_vllm_gives(installed) -> None:
    quant = configured({f"{SAVED}.shared_expert.down_proj": FULL})
    layer = RowParallelLinear(128, 128, bias=False, quant_config=quant, prefix=f"{BUILT}.shared_expert.down_proj")
    assert type(layer.quant_method) is UnquantizedLinearMethod
    assert hook.COUNT.dispatched == 0


@pytest.mark.parametrize("fused", ["shared_expert.gate_up_proj", "experts"])
def test_parts_that_differ_stop(installed, fused: str) -> None:
    quant = configured({f"{SAVED}.shared_expert.gate_proj": FP8, f"{SAVED}.experts.0.gate_proj": FP8})
    layer = object.__new__(MergedColumnParallelLinear if fused != "experts" else FusedMoE)
    with pytest.raises(ValueError, match=r"is one (fused layer|layer of experts) in vLLM"):
        quant.get_quant_method(layer, f"{BUILT}.{fused}")


def test_fp8_head_is_refused(installed) -> None:
    with pytest.raises(ValueError, match=r"asks for FP8 in language_model.lm_head, a ParallelLMHead"):
        configured({"lm_head": FP8}).get_quant_method(object.__new__(ParallelLMHead), "language_model.lm_head")


def test_a_cpu_is_refused(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    monkeypatch.setattr(plugin, "_installed", set())
    with pytest.raises(SystemExit) as caught:
        sparkpin_hybrid.register()
    cause = caught.value.__cause__
    assert isinstance(cause, UnsupportedPlatform) and "SPARKPIN_MOD_HYBRID_INT4_FP8=0" in str(cause)
