from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import sparkpin_vllm_cpu
import torch
from sparkpin_modkit import SignatureChanged, UnsupportedPlatform
from sparkpin_vllm_cpu.int4 import dequantise_int4
from vllm.model_executor.layers.quantization.inc.schemes.inc_wna16_scheme import INCWna16Scheme
from vllm_cpu_replaced import REPLACED, STOCK


def now() -> list[object]:
    return [getattr(owner, name) for owner, name in REPLACED]


def test_off_leaves_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKPIN_MOD_VLLM_CPU", "0")
    sparkpin_vllm_cpu.register()
    assert now() == list(STOCK.values())


def test_on_replaces_each_once() -> None:
    sparkpin_vllm_cpu.register()
    replaced = now()
    of_the_cpu = {"chunk_gated_delta_rule_cpu"}  # where vLLM's own is slow
    left = {name for (_, name), value in zip(REPLACED, replaced, strict=True) if value == STOCK[name]}
    assert left <= of_the_cpu
    sparkpin_vllm_cpu.register()
    assert now() == replaced


@pytest.mark.parametrize(("owner", "name"), REPLACED, ids=STOCK)
def test_a_changed_signature_stops(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(odd: Any) -> None:
        """Takes something else."""

    monkeypatch.setattr(owner, name, changed)
    with pytest.raises(SystemExit) as caught:
        sparkpin_vllm_cpu.register()
    assert isinstance(caught.value.__cause__, SignatureChanged)
    assert getattr(owner, name) is changed


def test_other_packings_are_refused() -> None:
    sparkpin_vllm_cpu.register()
    layer_config = SimpleNamespace(bits=8, sym=True, is_gptq=True, packing_format="auto_round:auto_gptq")
    with pytest.raises(UnsupportedPlatform, match=r"layers.0.mlp.experts: experts with bits=8"):
        INCWna16Scheme().get_moe_method(None, SimpleNamespace(moe_config=None), "layers.0.mlp.experts", layer_config)


def test_distribution_name_selects_the_cpu_platform() -> None:
    assert importlib.metadata.version("vllm") == "0.32.0+cpu"
    files = importlib.metadata.files("vllm") or []
    assert not [f for f in files if f.parts[0] == "vllm"]


def test_torchvision_imports_in_a_new_process() -> None:
    code = (
        "from vllm.platforms import current_platform\n"
        "assert current_platform.is_cpu(), current_platform\n"
        "import torchvision\n"
        "from sparkpin_vllm_cpu import torchvision_ops\n"
        "assert torchvision_ops.declare_missing_operators() is (torchvision_ops._library is not None)\n"
        "import torch\n"
        "torch.ops.torchvision.nms\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def pack(codes: torch.Tensor) -> torch.Tensor:
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)


@pytest.mark.parametrize(("experts", "rows", "groups", "group"), [(1, 3, 1, 32), (5, 7, 3, 128), (2, 128, 2, 64)])
def test_int4_is_exact(experts: int, rows: int, groups: int, group: int) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (experts, rows, groups * group), generator=generator)
    scales = torch.rand(experts, rows, groups, generator=generator).to(torch.bfloat16)
    wanted = torch.empty(experts, rows, groups * group)
    for k in range(groups * group):
        wanted[..., k] = (codes[..., k] - 8) * scales[..., k // group].float()
    assert torch.equal(dequantise_int4(pack(codes), scales, torch.float32), wanted)
    assert torch.equal(dequantise_int4(pack(codes), scales, torch.bfloat16), wanted.to(torch.bfloat16))


def test_int4_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="INT4: packed"):
        dequantise_int4(torch.zeros(2, 4, 8, dtype=torch.uint8), torch.ones(2, 5, 1), torch.float32)
