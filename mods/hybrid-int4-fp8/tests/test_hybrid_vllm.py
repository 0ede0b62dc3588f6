"""Through vLLM's real config, layers and weight loaders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sparkpin_hybrid
import torch
from inc_config import config_of
from sparkpin_hybrid import hook
from sparkpin_hybrid.count import LayerCount
from sparkpin_modkit import SignatureChanged
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
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
from vllm.model_executor.models.qwen3_5 import Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration
from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MoeMTP
from vllm.platforms import current_platform

FULL = {"bits": 16, "data_type": "float"}
FP8 = {"bits": 8, "group_size": [128, 128], "sym": True, "data_type": "fp"}
SHARED = "model.layers.0.mlp.shared_expert"


@pytest.fixture
def pristine(monkeypatch: pytest.MonkeyPatch, unregistered: None):
    original = INCConfig.get_quant_method
    original = getattr(original, "__wrapped__", original)
    monkeypatch.setattr(INCConfig, "get_quant_method", original)
    monkeypatch.setattr(hook, "COUNT", LayerCount())
    return original


@pytest.fixture
def installed(pristine, world):
    world.compilation_config.static_forward_context.clear()  # vLLM refuses a second layer of one name
    sparkpin_hybrid.register()
    return world


def config(**extra: dict[str, object]) -> INCConfig:
    out = config_of({f"{SHARED}.{name}": entry for name, entry in extra.items()})
    out.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    return out


def configured(model: type, extra: dict[str, dict[str, object]]) -> INCConfig:
    """The config as it is when vLLM builds the layers of `model`: its names mapped, its fused layers known."""
    out = config_of(extra)
    configure_quant_config(out, model)
    return out


def fp8_tensors(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(rows // 128, columns // 128, generator=generator) + 0.1
    return weight, scale, fp8_value(weight, scale)


def fp8_value(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    exact = weight.float() * scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return exact.to(torch.bfloat16)


def test_off_leaves_vllm_alone(pristine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKPIN_MOD_HYBRID_INT4_FP8", "0")
    sparkpin_hybrid.register()
    assert INCConfig.get_quant_method is pristine


def test_changed_signature_stops(pristine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(INCConfig, "get_quant_method", lambda self, layer: None)
    with pytest.raises(SystemExit) as caught:
        sparkpin_hybrid.register()
    assert isinstance(caught.value.__cause__, SignatureChanged)


def test_active_is_reported_once_all_layers_have_weights(installed, reported) -> None:
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
        assert reported() == []
        layer.quant_method.process_weights_after_loading(layer)
    [line] = reported()
    assert (line["event"], line["fp8_layers"]) == ("active", 2)


@pytest.fixture(params=["cpu", "kernels"])
def path(request: pytest.FixtureRequest, installed, monkeypatch: pytest.MonkeyPatch) -> str:
    """The forms of a CPU, and those of CUDA: vLLM's own methods on a CPU's memory, all but the choice of a kernel."""
    if request.param == "kernels":
        monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
        kernel = SimpleNamespace(process_weights_after_loading=PROCESSED.append)
        monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: kernel)
        monkeypatch.setattr(fp8, "select_fp8_moe_backend", lambda **_: (None, None))
        monkeypatch.setattr(fp8.Fp8MoEMethod, "process_weights_after_loading", lambda self, layer: PROCESSED.append(1))
        monkeypatch.setattr(installed, "model_config", SimpleNamespace(dtype=torch.bfloat16, model="/model"))
    PROCESSED.clear()
    return str(request.param)


PROCESSED: list[object] = []


@pytest.mark.parametrize("comes", [None, 0, 1], ids=["no scale", "gate's only", "up's only"])
def test_a_scale_that_never_came_stops_each_path(path: str, comes: int | None, reported) -> None:
    layer = MergedColumnParallelLinear(
        128,
        [128, 128],
        bias=False,
        quant_config=config(gate_proj=FP8, up_proj=FP8),
        prefix=f"{SHARED}.gate_up_proj",
        params_dtype=torch.bfloat16,
    )
    assert type(layer.quant_method.scheme).__name__ == {"cpu": "ReferenceFp8Scheme"}.get(path, "INCFp8LinearScheme")
    if comes is not None:
        _, scale, _ = fp8_tensors(128, 128, seed=0)
        layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scale, comes)
    with pytest.raises(
        ValueError, match=rf"{SHARED}.gate_up_proj.weight_scale_inv: .* unset or NaN, {1 + (comes is None)} of"
    ):
        layer.quant_method.process_weights_after_loading(layer)
    [line] = reported()
    assert line["event"] == "failed" and "model.safetensors.index.json" in line["error"]
    assert PROCESSED == [] and hook.COUNT.loaded == 0
    _, scale, _ = fp8_tensors(128, 128, seed=1)
    for part in (0, 1):
        layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scale, part)
    layer.quant_method.process_weights_after_loading(layer)
    assert hook.COUNT.loaded == 1


def test_one_scale_of_one_expert_that_never_came_stops_each_path(path: str) -> None:
    layer = mtp_experts(EXPERTS)
    assert type(layer.quant_method).__name__ == {"cpu": "ReferenceFp8Experts"}.get(path, "Fp8MoEMethod")
    for expert in range(3):
        for shard, rows, columns in (("w1", 128, 256), ("w3", 128, 256), ("w2", 256, 128)):
            name = f"{'w2' if shard == 'w2' else 'w13'}_weight_scale_inv"
            if (expert, shard) != (1, "w3"):
                parameter = getattr(layer, name)
                _, scale, _ = fp8_tensors(rows, columns, seed=1)
                parameter.weight_loader(parameter, scale, f"experts.{name}", shard, expert)
    with pytest.raises(ValueError, match=r"mtp.layers.0.mlp.experts.w13_weight_scale_inv: .* unset or NaN, 2 of 12"):
        layer.quant_method.process_weights_after_loading(layer)
    assert PROCESSED == [] and hook.COUNT.loaded == 0


def test_parts_that_split_a_block_are_refused(installed) -> None:
    quant = config(gate_proj=FP8, up_proj=FP8)
    with pytest.raises(ValueError, match="not divisible by"):
        MergedColumnParallelLinear(128, [64, 128], bias=False, quant_config=quant, prefix=f"{SHARED}.gate_up_proj")


def is_loaded_exactly(layer, parts: dict[tuple[object, ...], int]) -> bool:
    """Give each part of a layer FP8 weights and scales as vLLM's loader does: whether it computes what they stand for.

    parts: what the loader is told of a part (nothing where there is one), and its rows.
    """
    exact = []
    for seed, (shard, rows) in enumerate(parts.items()):
        weight, scale, value = fp8_tensors(rows, layer.input_size, seed)
        layer.weight.weight_loader(layer.weight, weight, *shard)
        layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scale, *shard)
        exact.append(value)
    layer.quant_method.process_weights_after_loading(layer)
    # Read through the layer, whose CPU form may have packed the weight away.
    eye = torch.eye(layer.input_size, dtype=torch.bfloat16)
    return torch.equal(layer.quant_method.apply(layer, eye).T, torch.cat(exact))


# The names that vLLM's text model, its multimodal model and its drafter have for modules of one checkpoint.
MODELS = [
    (Qwen3_5MoeForCausalLM, "model.language_model.layers.3", "model.layers.3"),
    (Qwen3_5MoeForCausalLM, "model.layers.3", "model.layers.3"),
    (Qwen3_5MoeForConditionalGeneration, "model.language_model.layers.3", "language_model.model.layers.3"),
    (Qwen3_5MoeMTP, "mtp.layers.0", "mtp.layers.0"),
]


@pytest.mark.parametrize(("model", "saved", "prefix"), MODELS)
def test_attention_in_fp8(installed, model: type, saved: str, prefix: str) -> None:
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    quant = configured(model, {f"{saved}.self_attn.{part}": FP8 for part in parts})
    qkv = QKVParallelLinear(
        256,
        64,
        8,
        2,
        bias=False,
        quant_config=quant,
        prefix=f"{prefix}.self_attn.qkv_proj",
        params_dtype=torch.bfloat16,
    )
    assert is_loaded_exactly(qkv, {("q",): 512, ("k",): 128, ("v",): 128})
    out = RowParallelLinear(
        512, 256, bias=False, quant_config=quant, prefix=f"{prefix}.self_attn.o_proj", params_dtype=torch.bfloat16
    )
    assert is_loaded_exactly(out, {(): 256})
    assert (hook.COUNT.dispatched, hook.COUNT.loaded) == (2, 2)


@pytest.mark.parametrize(("model", "saved", "prefix"), MODELS[:3])
def test_linear_attention_in_fp8(installed, model: type, saved: str, prefix: str) -> None:
    """vLLM puts in_proj_qkv, itself three parts of unlike size, and in_proj_z into one layer."""
    names = [f"{saved}.linear_attn.{part}" for part in ("in_proj_qkv", "in_proj_z")]
    layer = MergedColumnParallelLinear(
        256,
        [128, 128, 384, 384],
        bias=False,
        quant_config=configured(model, dict.fromkeys(names, FP8)),
        prefix=f"{prefix}.linear_attn.in_proj_qkvz",
        params_dtype=torch.bfloat16,
    )
    assert is_loaded_exactly(layer, {((0, 1, 2),): 640, (3,): 384})


def test_mtp_projection_in_fp8(installed) -> None:
    quant = configured(Qwen3_5MoeMTP, {"mtp.fc": FP8})
    layer = RowParallelLinear(512, 256, bias=False, quant_config=quant, prefix="mtp.fc", params_dtype=torch.bfloat16)
    assert layer.weight.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(("model", "saved", "prefix"), MODELS)
def test_plain_modules_over_int4(installed, model: type, saved: str, prefix: str) -> None:
    """What vLLM 0.32 does with 16-bit entries by itself; the `plain` rules of hybrid checkpoints stand on it."""
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    quant = configured(model, {f"{saved}.self_attn.{part}": FULL for part in parts})
    for name in ("qkv_proj", "o_proj"):
        layer = object.__new__(QKVParallelLinear)
        assert isinstance(quant.get_quant_method(layer, f"{prefix}.self_attn.{name}"), UnquantizedLinearMethod)
    assert hook.COUNT.dispatched == 0


@pytest.mark.parametrize(("model", "saved", "prefix"), MODELS[:3])
@pytest.mark.parametrize(
    ("q_proj", "message"),
    [(FULL, "Fused module .* requires consistent quant config"), (FP8, "is one fused layer in vLLM")],
    ids=["plain", "fp8"],
)
def test_attention_of_two_formats_stops(installed, model: type, saved: str, prefix: str, q_proj, message: str) -> None:
    quant = configured(model, {f"{saved}.self_attn.q_proj": q_proj})
    with pytest.raises(ValueError, match=message):
        QKVParallelLinear(128, 64, 8, 2, bias=False, quant_config=quant, prefix=f"{prefix}.self_attn.qkv_proj")


@pytest.mark.parametrize(
    ("model", "prefix"),
    [(Qwen3_5MoeMTP, "lm_head"), (Qwen3_5MoeForConditionalGeneration, "language_model.lm_head")],
)
def test_fp8_head_is_refused(installed, model: type, prefix: str) -> None:
    quant = configured(model, {"lm_head": FP8})
    with pytest.raises(ValueError, match=f"asks for FP8 in {prefix}, a ParallelLMHead"):
        quant.get_quant_method(object.__new__(ParallelLMHead), prefix)


def mtp_experts(extra: dict[str, dict[str, object]], *, inner: int = 128) -> RoutedExperts:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it makes a model
    try:
        module = FusedMoEFactory(
            num_experts=3,
            top_k=2,
            hidden_size=256,
            intermediate_size=inner,
            params_dtype=torch.bfloat16,
            quant_config=configured(Qwen3_5MoeMTP, extra),
            prefix="mtp.layers.0.mlp.experts",
        )
    finally:
        torch.set_default_dtype(before)
    return next(m for m in module.modules() if isinstance(m, RoutedExperts))


EXPERTS = {
    f"mtp.layers.0.mlp.experts.{expert}.{matrix}_proj": FP8 for expert in range(3) for matrix in ("gate", "up", "down")
}


def test_experts_in_fp8(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = mtp_experts(EXPERTS)
    assert layer.w13_weight.dtype == layer.w2_weight.dtype == torch.float8_e4m3fn
    assert layer.w13_weight_scale_inv.dtype == layer.w2_weight_scale_inv.dtype == torch.float32
    wanted: dict[str, list[torch.Tensor]] = {"w1": [], "w2": [], "w3": []}
    for expert in range(3):
        for shard, rows, columns in (("w1", 128, 256), ("w3", 128, 256), ("w2", 256, 128)):
            weight, scale, _ = fp8_tensors(rows, columns, seed=10 * expert + int(shard[1]))
            scale = scale.to(torch.bfloat16)  # as published
            wanted[shard].append(fp8_value(weight, scale))
            for suffix, tensor in (("weight", weight), ("weight_scale_inv", scale)):
                name = f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor, f"experts.{name}", shard, expert)
    # vLLM's own part packs the weights for its kernel; what it is given is what counts here.
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "process_weights_after_loading", lambda self, layer: None)
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer.w13_weight.data[:, :128], torch.stack(wanted["w1"]))
    assert torch.equal(layer.w13_weight.data[:, 128:], torch.stack(wanted["w3"]))
    assert torch.equal(layer.w2_weight.data, torch.stack(wanted["w2"]))
    assert (hook.COUNT.dispatched, hook.COUNT.loaded) == (1, 1)


def test_experts_that_split_a_block_are_refused(installed) -> None:
    with pytest.raises(ValueError, match="experts of 64 rows, expected a multiple of the FP8 block's 128"):
        mtp_experts(EXPERTS, inner=64)


def test_experts_without_entries_get_what_vllm_gives(installed) -> None:
    assert isinstance(mtp_experts({}).quant_method, UnquantizedFusedMoEMethod)
    assert hook.COUNT.dispatched == 0
