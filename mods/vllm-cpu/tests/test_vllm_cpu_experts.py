"""GPTQ-packed experts through vLLM's real layer and weight loader."""

from __future__ import annotations

import pytest
import sparkpin_vllm_cpu
import torch
from sparkpin_vllm_cpu import experts as experts_module
from sparkpin_vllm_cpu.experts import ReferenceInt4Experts
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.quantization.inc import INCConfig

EXPERTS, HIDDEN, INTER, GROUP = 4, 256, 128, 64


@pytest.fixture
def installed(world, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(experts_module, "_created", 0)
    monkeypatch.setattr(experts_module, "_loaded", 0)
    sparkpin_vllm_cpu.register()


def gptq(rows: int, columns: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A checkpoint's tensors for a ``[rows, columns]`` weight, and the weight that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    scales = (torch.rand(rows, columns // GROUP, generator=generator) * 0.01 + 0.001).to(torch.bfloat16)
    weight = ((codes - 8).float() * scales.float().repeat_interleave(GROUP, 1)).to(torch.bfloat16)
    words = torch.zeros(columns // 8, rows, dtype=torch.int64)
    for i in range(8):
        words |= codes.T[i::8] << (4 * i)
    qweight = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {"qweight": qweight, "scales": scales.T.to(torch.float16).contiguous()}, weight


def routed(module: torch.nn.Module) -> RoutedExperts:
    return next(m for m in module.modules() if isinstance(m, RoutedExperts))


def test_experts_load_and_expand(installed, monkeypatch: pytest.MonkeyPatch, reported) -> None:
    quant = INCConfig.from_config({"bits": 4, "group_size": GROUP, "sym": True, "data_type": "int"})
    layer = routed(
        FusedMoEFactory(
            num_experts=EXPERTS,
            top_k=2,
            hidden_size=HIDDEN,
            intermediate_size=INTER,
            params_dtype=torch.bfloat16,
            quant_config=quant,
            prefix="model.layers.0.mlp.experts",
        )
    )
    method = layer.quant_method
    assert isinstance(method, ReferenceInt4Experts)

    wanted: dict[str, list[torch.Tensor]] = {"w1": [], "w2": [], "w3": []}
    for expert in range(EXPERTS):
        for shard, rows, columns in (("w1", INTER, HIDDEN), ("w3", INTER, HIDDEN), ("w2", HIDDEN, INTER)):
            tensors, weight = gptq(rows, columns, seed=10 * expert + int(shard[1]))
            wanted[shard].append(weight)
            for suffix, tensor in tensors.items():
                name = f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor, f"experts.{name}", shard, expert)

    seen: dict[str, torch.Tensor] = {}
    base = ReferenceInt4Experts.__mro__[1]

    def before_packing(self, layer) -> None:
        seen.update(w13=layer.w13_weight.data.clone(), w2=layer.w2_weight.data.clone())

    monkeypatch.setattr(base, "process_weights_after_loading", before_packing)
    method.process_weights_after_loading(layer)
    assert torch.equal(seen["w13"], torch.cat((torch.stack(wanted["w1"]), torch.stack(wanted["w3"])), dim=1))
    assert torch.equal(seen["w2"], torch.stack(wanted["w2"]))
    assert not [name for name, _ in layer.named_parameters() if "qweight" in name or "scales" in name]
    [line] = reported()
    assert (line["event"], line["int4_expert_layers"]) == ("active", 1)
