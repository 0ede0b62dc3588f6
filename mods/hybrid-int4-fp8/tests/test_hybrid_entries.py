from __future__ import annotations

import pytest
import torch
from sparkpin_hybrid.dequantise import dequantise_blocks
from sparkpin_hybrid.entries import (
    EXPERT_MATRICES,
    are_fp8_experts,
    is_fp8,
    refuse_other_layers,
)

PACKED = {
    "gate_up_proj": ["gate_proj", "up_proj"],
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
}
FP8 = {"bits": 8, "group_size": [128, 128], "sym": True, "data_type": "fp"}
FULL = {"bits": 16, "data_type": "float"}
SHARED = "model.layers.0.mlp.shared_expert"


@pytest.mark.parametrize("prefix", ["layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj"])
def test_leading_model_is_optional(prefix: str) -> None:
    assert is_fp8(prefix, {"model.layers.0.mlp.down_proj": FP8}, PACKED)


@pytest.mark.parametrize("entry", [FULL, {"bits": 4}, {"bits": 8, "group_size": 128, "data_type": "int"}, {}])
def test_other_entries_are_left_to_vllm(entry: dict[str, object]) -> None:
    assert not is_fp8(f"{SHARED}.down_proj", {f"{SHARED}.down_proj": entry}, PACKED)


@pytest.mark.parametrize("extra", [None, {}, {f"{SHARED}.down_proj": FP8}])
def test_layers_without_an_entry_are_left_to_vllm(extra: dict[str, dict[str, object]] | None) -> None:
    assert not is_fp8(f"{SHARED}.gate_up_proj", extra, PACKED)
    assert not is_fp8("model.layers.0.self_attn.o_proj", extra, PACKED)


@pytest.mark.parametrize(
    ("fused", "parts"),
    [
        (f"{SHARED}.gate_up_proj", ("gate_proj", "up_proj")),
        ("model.layers.3.self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("model.layers.0.linear_attn.in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
        ("mtp.layers.0.self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    ],
)
def test_a_fused_layer_is_what_all_its_parts_are(fused: str, parts: tuple[str, ...]) -> None:
    parent, dot, _ = fused.rpartition(".")
    names = [parent + dot + part for part in parts]
    whole = dict.fromkeys(names, FP8)
    assert is_fp8(fused, whole, PACKED)
    for name in names:
        for extra in (whole | {name: FULL}, dict.fromkeys(set(names) - {name}, FP8)):
            with pytest.raises(ValueError, match=f"{fused} is one fused layer") as caught:
                is_fp8(fused, extra, PACKED)
            assert all(f"{part}: {extra.get(part, 'no entry')}" in str(caught.value) for part in names)


EXPERTS = "mtp.layers.0.mlp.experts"
ALL_EXPERTS = {f"{EXPERTS}.{expert}.{matrix}": FP8 for expert in range(3) for matrix in EXPERT_MATRICES}


@pytest.mark.parametrize("before", ["", "model."])
def test_experts_take_the_entry_of_all_their_matrices(before: str) -> None:
    extra = {before + name: entry for name, entry in ALL_EXPERTS.items()}
    assert are_fp8_experts(EXPERTS, extra)


@pytest.mark.parametrize("extra", [None, {}, {f"{EXPERTS}_gate": FP8}, dict.fromkeys(ALL_EXPERTS, FULL)])
def test_experts_without_an_entry_are_left_to_vllm(extra: dict[str, dict[str, object]] | None) -> None:
    assert not are_fp8_experts(EXPERTS, extra)
    assert not are_fp8_experts("", ALL_EXPERTS)


@pytest.mark.parametrize("odd", ["0.gate_proj", "1.down_proj"])
@pytest.mark.parametrize("other", [FULL, None])
def test_experts_that_differ_raise(odd: str, other: dict[str, object] | None) -> None:
    extra = {name: entry for name, entry in ALL_EXPERTS.items() if not name.endswith(f".{odd}")}
    if other is not None:
        extra[f"{EXPERTS}.{odd}"] = other
    with pytest.raises(ValueError, match="is one layer of experts") as caught:
        are_fp8_experts(EXPERTS, extra)
    assert f"8 of its modules have FP8 entries in quantization_config.extra_config, but {EXPERTS}.{odd} is" in str(
        caught.value
    )
    assert str(other or "no entry") in str(caught.value)


def test_an_unknown_matrix_of_an_expert_raises() -> None:
    with pytest.raises(ValueError, match=rf"but {EXPERTS}.0.gate_up_proj is"):
        are_fp8_experts(EXPERTS, ALL_EXPERTS | {f"{EXPERTS}.0.gate_up_proj": FP8})


@pytest.mark.parametrize("entry", ["lm_head", "model.lm_head", "lm_head.inner"])
def test_fp8_in_layers_that_have_no_such_form_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=rf"'{entry}'\] asks for FP8 in lm_head, a ParallelLMHead"):
        refuse_other_layers("ParallelLMHead", "lm_head", {EXPERTS: FULL, entry: FP8})


def test_entries_of_other_layers_are_no_reason_to_refuse() -> None:
    for extra in ({"lm_head_norm": FP8, "lm_head": FULL}, None):
        refuse_other_layers("ParallelLMHead", "lm_head", extra)
    refuse_other_layers("Attention", "", {"x": FP8})


@pytest.mark.parametrize(
    "change", [{"group_size": [64, 128]}, {"group_size": 128}, {"group_size": None}, {"sym": False}]
)
def test_unknown_fp8_form_raises(change: dict[str, object]) -> None:
    extra = {f"{SHARED}.down_proj": {**FP8, **change}}
    with pytest.raises(ValueError, match=r"expected group_size \[128, 128\] and sym true"):
        is_fp8(f"{SHARED}.down_proj", extra, PACKED)


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (256, 384), (130, 200), (1, 1), (127, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantisation_is_exact(rows: int, columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) + 0.01
    wanted = torch.empty(rows, columns)
    for n in range(scale.shape[0]):
        for k in range(scale.shape[1]):
            block = slice(128 * n, 128 * n + 128), slice(128 * k, 128 * k + 128)
            wanted[block] = weight[block].float() * scale[n, k]
    assert torch.equal(dequantise_blocks(weight, scale, (128, 128), dtype), wanted.to(dtype))


def test_missing_scales_raise() -> None:
    weight = torch.zeros(256, 128).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"scales \(1, 1\).*expected \(2, 1\)"):
        dequantise_blocks(weight, torch.ones(1, 1), (128, 128), torch.float32)
