"""The backend against `naive`, and its place in vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sparkpin_turboquant
import torch
from sparkpin_modkit import SignatureChanged
from sparkpin_modkit.testing import parse_reports
from sparkpin_turboquant import naive
from sparkpin_turboquant.common import vllm_slot_bytes
from sparkpin_turboquant.cpu import TurboQuantBackend, TurboQuantImpl, TurboQuantMetadata, TurboQuantMetadataBuilder
from sparkpin_turboquant.formats import FORMATS
from sparkpin_turboquant.hook import ON_CPU, ON_GPU
from sparkpin_turboquant.touches import ON_CUDA
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

CACHE_DTYPE = "turboquant_4bit_nc"
STOCK = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def choose(cache_dtype: str | None) -> str:
    config = AttentionSelectorConfig(head_size=64, dtype=torch.bfloat16, kv_cache_dtype=cache_dtype, block_size=None)
    return CpuPlatform.get_attn_backend_cls(None, config, num_heads=4)


@pytest.fixture
def pristine(monkeypatch: pytest.MonkeyPatch, unregistered: None):
    """The method as vLLM wrote it; a method that the mod has replaced hides it in its closure."""
    bound = CpuPlatform.__dict__["get_attn_backend_cls"]
    for cell in bound.__func__.__closure__ or ():
        if getattr(cell.cell_contents, "__func__", None) is not None:
            bound = classmethod(cell.cell_contents.__func__)
    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", bound)
    AttentionBackendEnum.TURBOQUANT.clear_override()
    yield bound
    AttentionBackendEnum.TURBOQUANT.clear_override()


def test_off_leaves_vllm_alone(pristine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKPIN_MOD_TURBOQUANT", "0")
    sparkpin_turboquant.register()
    assert CpuPlatform.__dict__["get_attn_backend_cls"] is pristine
    assert not AttentionBackendEnum.TURBOQUANT.is_overridden()
    assert choose("auto") == STOCK


@pytest.mark.parametrize("cache_dtype", [None, "auto", "fp8", "bfloat16"])
def test_other_cache_types_get_the_stock_backend(pristine, cache_dtype: str | None) -> None:
    sparkpin_turboquant.register()
    assert choose(cache_dtype) == STOCK
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()


def test_the_option_chooses_the_backend(pristine) -> None:
    sparkpin_turboquant.register()
    sparkpin_turboquant.register()
    assert choose(CACHE_DTYPE) == ON_CPU
    assert AttentionBackendEnum[TurboQuantBackend.get_name()].get_class() is TurboQuantBackend


@pytest.mark.parametrize("cache_dtype", list(FORMATS))
def test_each_preset_chooses_it(pristine, cache_dtype: str) -> None:
    sparkpin_turboquant.register()
    assert choose(cache_dtype) == ON_CPU


def test_other_types_of_the_kind_are_refused(pristine) -> None:
    """Also by the backend, which the CUDA platform asks."""
    sparkpin_turboquant.register()
    for refuse in (choose, TurboQuantBackend.supports_kv_cache_dtype):
        with pytest.raises(ValueError, match=r"--kv-cache-dtype turboquant_3bit_nc, expected one of turboquant_k8v4"):
            refuse("turboquant_3bit_nc")
    assert not TurboQuantBackend.supports_kv_cache_dtype("fp8")


def test_changed_signature_stops(pristine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", classmethod(lambda cls, selected_backend, head: ""))
    with pytest.raises(SystemExit) as caught:
        sparkpin_turboquant.register()
    assert isinstance(caught.value.__cause__, SignatureChanged)
    assert not AttentionBackendEnum.TURBOQUANT.is_overridden()


def test_another_platform_stops(pristine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "is_cpu", lambda self: False)
    with pytest.raises(SystemExit) as caught:
        sparkpin_turboquant.register()
    assert "SPARKPIN_MOD_TURBOQUANT=0" in str(caught.value.__cause__)


def test_on_cuda_the_registry_names_the_kernels_backend(pristine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform is this one, called CUDA: without what only that has, which ON_CUDA declares."""
    monkeypatch.setattr(CpuPlatform, "is_cpu", lambda self: False)
    monkeypatch.setattr(CpuPlatform, "is_cuda", lambda self: True)
    monkeypatch.setattr("sparkpin_turboquant.hook.ON_CUDA", {release: {} for release in ON_CUDA})
    sparkpin_turboquant.register()
    assert AttentionBackendEnum.TURBOQUANT.get_path() == ON_GPU
    assert CpuPlatform.__dict__["get_attn_backend_cls"] is pristine


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_spec_holds_a_slot_and_is_smaller(head_dim: int, name: str) -> None:
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=head_dim, dtype=torch.uint8, kv_quant_mode=get_kv_quant_mode(name)
    )
    customised = TurboQuantBackend.customize_spec(spec)
    slot = vllm_slot_bytes(FORMATS[name], head_dim)
    assert customised.state_content_bytes == slot >= FORMATS[name].slot_bytes(head_dim)
    assert customised.page_size_bytes == 16 * 2 * slot
    assert slot <= FORMATS[name].slot_bytes(head_dim) + 2


@pytest.mark.parametrize("name", list(FORMATS))
def test_spec_agrees_with_the_one_vllm_pads_gdn_pages_by(name: str) -> None:
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend as Stock

    spec = FullAttentionSpec(
        block_size=1, num_kv_heads=2, head_size=256, dtype=torch.uint8, kv_quant_mode=get_kv_quant_mode(name)
    )
    assert Stock.customize_spec(spec).page_size_bytes == TurboQuantBackend.customize_spec(spec).page_size_bytes


def test_spec_of_another_cache_type_is_left_alone() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    assert TurboQuantBackend.customize_spec(spec) is spec


def test_active_is_reported_when_the_cache_exists(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr("sparkpin_modkit.reports._vllm_logger", lambda: None)
    spec = SimpleNamespace(head_size=256, state_content_bytes=262)
    TurboQuantMetadataBuilder(spec, ["a", "b"], None, torch.device("cpu"))
    [line] = parse_reports(capfd.readouterr().err)
    assert (line["event"], line["head_dim"], line["slot_bytes"], line["bf16_bytes"]) == ("active", 256, 262, 1024)


def impl(heads: int = 8, kv_heads: int = 2, head_dim: int = 64, **kwargs) -> TurboQuantImpl:
    arguments = {"kv_cache_dtype": CACHE_DTYPE, **kwargs}
    return TurboQuantImpl(heads, head_dim, head_dim**-0.5, kv_heads, **arguments)


def poisoned_cache(blocks: int, kv_heads: int, block_size: int, head_dim: int) -> torch.Tensor:
    """``[blocks, Hkv, block_size, slot]`` as vLLM hands it: heads inside tokens in memory; 0x7E makes norms NaN."""
    physical = torch.full(
        (blocks, block_size, kv_heads, vllm_slot_bytes(FORMATS[CACHE_DTYPE], head_dim)), 0x7E, dtype=torch.uint8
    )
    return physical.transpose(1, 2)


def test_batch_of_prefill_decode_and_draft_steps() -> None:
    """Three requests in scattered blocks, written in two steps, one padded slot; each against `naive` on its own."""
    heads, kv_heads, head_dim, block_size = 8, 2, 64, 16
    layer = impl(heads, kv_heads, head_dim)
    cache = poisoned_cache(12, kv_heads, block_size, head_dim)
    table = torch.tensor([[7, 2, 9], [4, 0, 0], [11, 3, 0]], dtype=torch.int32)
    lengths, new = [40, 5, 32], [1, 5, 3]
    keys = [gaussian(n, kv_heads, head_dim, seed=10 + i) for i, n in enumerate(lengths)]
    values = [gaussian(n, kv_heads, head_dim, seed=20 + i) for i, n in enumerate(lengths)]

    def slots(request: int, first: int, last: int) -> list[int]:
        return [int(table[request, t // block_size]) * block_size + t % block_size for t in range(first, last)]

    for request, (length, count) in enumerate(zip(lengths, new, strict=True)):
        old = length - count
        mapping = torch.tensor(slots(request, 0, old), dtype=torch.long)
        layer.do_kv_cache_update(None, keys[request][:old], values[request][:old], cache, mapping)

    mapping = [slot for i in range(3) for slot in slots(i, lengths[i] - new[i], lengths[i])] + [-1]
    key = torch.cat([keys[i][-new[i] :] for i in range(3)] + [gaussian(1, kv_heads, head_dim)])
    value = torch.cat([values[i][-new[i] :] for i in range(3)] + [gaussian(1, kv_heads, head_dim)])
    query = gaussian(10, heads, head_dim, seed=3)
    before = cache.clone()
    layer.do_kv_cache_update(None, key, value, cache, torch.tensor(mapping))
    assert bool((cache != before).any())

    metadata = TurboQuantMetadata([0, 1, 6, 9], lengths, table, torch.tensor(mapping))
    output = torch.full((10, heads * head_dim), float("nan"), dtype=torch.bfloat16)
    assert layer.forward(None, query, key, value, cache, metadata, output) is output
    start = 0
    for i in range(3):
        stored = [naive.dequantise(*naive.quantise(x)) for x in (keys[i], values[i])]
        wanted = naive.attention(query[start : start + new[i]], *stored, layer.scale)
        got = output.view(10, heads, head_dim)[start : start + new[i]].float()
        assert torch.allclose(got, wanted, atol=2e-5, rtol=2**-8)
        start += new[i]
    assert bool(output[9].isnan().all())


def test_profiling_run_without_a_cache() -> None:
    output = torch.ones(2, 512)
    assert impl().forward(None, None, None, None, None, None, output) is output


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alibi_slopes", [1.0]),
        ("sliding_window", 128),
        ("logits_soft_cap", 30.0),
        ("kv_sharing_target_layer_name", "layers.0"),
        ("sinks", torch.zeros(8)),
    ],
)
def test_unsupported_attention_is_refused(name: str, value: object) -> None:
    with pytest.raises(NotImplementedError, match=name):
        impl(**{name: value})


def test_wrong_type_or_head_size_is_refused() -> None:
    with pytest.raises(ValueError, match="--kv-cache-dtype auto"):
        impl(kv_cache_dtype="auto")
    with pytest.raises(ValueError, match="head_dim 96"):
        impl(head_dim=96)


def test_attention_that_is_not_causal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkpin_modkit.reports._vllm_logger", lambda: None)
    builder = TurboQuantMetadataBuilder(
        SimpleNamespace(head_size=64, state_content_bytes=70), [], None, torch.device("cpu")
    )
    with pytest.raises(NotImplementedError, match="not causal"):
        builder.build(0, SimpleNamespace(causal=False))
