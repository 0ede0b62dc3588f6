"""Through vLLM's real ParallelLMHead, in one process."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import sparkpin_int8_lm_head
import torch
from sparkpin_int8_lm_head import method, naive
from sparkpin_int8_lm_head.method import Int8LMHeadMethod
from sparkpin_modkit import ModError, SignatureChanged, UnsupportedPlatform
from vllm.config import SpeculativeConfig
from vllm.config.lora import LoRAConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import StageMissingLayer, no_init_weights


class HeadConfig(QuantizationConfig):
    """A config that chooses `method` for every layer, as AutoRound's does for a head left at 16 bits."""

    def __init__(self, method) -> None:
        super().__init__()
        self.method = method

    get_name = get_supported_act_dtypes = get_min_capability = get_config_filenames = from_config = None

    def get_quant_method(self, layer, prefix):
        return self.method


HeadConfig.__abstractmethods__ = frozenset()


@pytest.fixture
def pristine(monkeypatch: pytest.MonkeyPatch, unregistered: None):
    original = ParallelLMHead.__init__
    original = getattr(original, "__wrapped__", original)
    monkeypatch.setattr(ParallelLMHead, "__init__", original)
    monkeypatch.setattr(method, "_heads", weakref.WeakSet())  # those of other tests may wait for the collector
    return original


@pytest.fixture
def installed(pristine, world):
    sparkpin_int8_lm_head.register()
    return world


def new_head(vocabulary: int = 500, width: int = 100, **kwargs) -> ParallelLMHead:
    return ParallelLMHead(vocabulary, width, params_dtype=torch.bfloat16, **kwargs)


def fill(head: ParallelLMHead, vocabulary: int, width: int) -> torch.Tensor:
    weight = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    weight[:, 5] *= 8
    head.weight.weight_loader(head.weight, weight)
    return weight


def test_off_leaves_vllm_alone(pristine, world, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKPIN_MOD_INT8_LM_HEAD", "0")
    sparkpin_int8_lm_head.register()
    assert ParallelLMHead.__init__ is pristine
    assert type(new_head().quant_method) is UnquantizedEmbeddingMethod


def test_on_wraps_once(installed) -> None:
    wrapped = ParallelLMHead.__init__
    sparkpin_int8_lm_head.register()
    assert ParallelLMHead.__init__ is wrapped
    assert type(new_head().quant_method.inner) is UnquantizedEmbeddingMethod


@pytest.mark.parametrize("inner", [UnquantizedEmbeddingMethod, UnquantizedLinearMethod])
def test_head_loads_converts_and_computes(installed, inner, reported) -> None:
    head = new_head(quant_config=HeadConfig(inner()))
    weight = fill(head, 500, 100)
    head.quant_method.process_weights_after_loading(head)
    assert head.weight.numel() == 1 and "weight" not in dict(head.named_parameters())
    assert "weight_int8" not in head.state_dict()

    [line] = reported()
    assert {key: line[key] for key in ("mod", "event", "V", "K", "outlier_columns")} == {
        "mod": "int8-lm-head",
        "event": "active",
        "V": 512,
        "K": 100,
        "outlier_columns": 1,
    }
    assert line["kernel"] == "int8pack" and "tied" not in line and "shared" not in line
    assert line["mib_after"] < 0.67 * line["mib_before"]  # 100 columns are kept as 128

    x = torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    bias = torch.randn(512).to(torch.bfloat16)
    got = head.quant_method.apply(head, x)
    assert got.shape == (2, 3, 512) and got.dtype == torch.bfloat16
    assert bool((got[..., 500:] == 0).all())
    wanted = x.float() @ weight.float().T
    assert float((got[..., :500].float() - wanted).norm() / wanted.norm()) < 0.01
    assert torch.equal(head.quant_method.apply(head, x, bias), got + bias)

    exact = naive.logits(
        x.view(6, 100), head.weight_int8[:, :100], head.weight_row_scale.float(), head.weight_column_scale.float()
    )
    assert float((got.view(6, 512).float() - exact).abs().max() / exact.abs().max()) < 2**-8


def test_logits_and_top_tokens_through_vllm_s_processor(installed) -> None:
    """What sampling, logprobs, prompt_logprobs and a drafter's greedy choice call."""
    head = new_head()
    weight = fill(head, 500, 100)
    head.quant_method.process_weights_after_loading(head)
    x = weight[[3, 499, 77]].clone()  # each aimed at one token
    x[:, 5] = 0  # the outlier column
    processor = LogitsProcessor(500)
    logits = processor(head, x)
    assert logits.shape == (3, 500) and logits.argmax(1).tolist() == [3, 499, 77]
    assert torch.equal(logits, head.quant_method.apply(head, x)[:, :500])
    assert processor.get_top_tokens(head, x).tolist() == [3, 499, 77]


def test_the_16_bit_weight_is_gone_when_loading_ends(installed) -> None:
    """vLLM measures what is left for the KV cache after `process_weights_after_loading`."""
    head = new_head()
    fill(head, 500, 100)
    parameter, memory = weakref.ref(head.weight), weakref.ref(head.weight.untyped_storage())
    head.quant_method.process_weights_after_loading(head)
    gc.collect()
    assert parameter() is None and memory() is None


def test_a_pooling_model_that_borrows_a_head_finds_it_in_16_bits(installed, reported) -> None:
    """vLLM's adapters make a classifier of rows of a head that they load and then delete; others have no head."""
    model = torch.nn.Module()
    model.lm_head = new_head()
    weight = fill(model.lm_head, 500, 100)
    assert torch.equal(model.lm_head.weight.data[[7]], weight[[7]])
    del model.lm_head
    for module in model.modules():
        if isinstance(quant_method := getattr(module, "quant_method", None), Int8LMHeadMethod):
            quant_method.process_weights_after_loading(module)
    assert reported() == [] and not list(method._heads)


class Embedder(torch.nn.Module):
    """A generating model that vLLM makes an embedding model of: its head is never loaded nor computed."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        with no_init_weights(self, partial(StageMissingLayer, "output"), targets=(ParallelLMHead,)):
            self.embed_tokens = VocabParallelEmbedding(500, 100, params_dtype=torch.bfloat16)
            self.lm_head = new_head()
            if tied:
                self.lm_head = self.lm_head.tie_weights(self.embed_tokens)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_pooling_model_keeps_no_head(installed, tied, reported) -> None:
    model = Embedder(tied)
    weight = fill(model.embed_tokens, 500, 100)
    assert isinstance(model.lm_head, StageMissingLayer) and type(model.lm_head.quant_method) is Int8LMHeadMethod
    for module in model.modules():
        if isinstance(quant_method := getattr(module, "quant_method", None), QuantizeMethodBase):
            quant_method.process_weights_after_loading(module)
    assert torch.equal(model.embed_tokens(torch.tensor([7])), weight[7:8])
    assert reported() == [] and not list(method._heads)


@pytest.mark.parametrize(("way", "float32"), [(None, True), ("greedy", True), ("probabilistic", False)])
def test_logits_that_vllm_keeps_of_drafts_are_of_the_model_s_type(installed, monkeypatch, way, float32) -> None:
    speculative = SpeculativeConfig.__new__(SpeculativeConfig) if way else None
    if speculative:
        speculative.draft_sample_method = way
    monkeypatch.setattr(installed, "speculative_config", speculative)
    assert new_head().quant_method.float32 is float32


def test_some_rows_are_a_head_of_their_own(installed) -> None:
    """For a drafter that drafts from a part of the vocabulary (mods/draft-vocabulary)."""
    head = new_head()
    fill(head, 500, 100)
    head.quant_method.process_weights_after_loading(head)
    index = torch.tensor([499, *range(62), 3])
    rows = torch.nn.Module()
    head.quant_method.select_rows(head, index, rows)
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    assert torch.equal(head.quant_method.apply(rows, x), head.quant_method.apply(head, x)[:, index])
    assert rows.weight_int8.data_ptr() != head.weight_int8.data_ptr() and rows.state_dict() == {}


def test_equal_heads_share_their_memory(installed, reported) -> None:
    """A drafter with a copy of its target's head, as an MTP layer has one."""
    first, second = new_head(), new_head()
    for head in (first, second):
        fill(head, 500, 100)
        head.quant_method.process_weights_after_loading(head)
    assert second.weight_int8.data_ptr() == first.weight_int8.data_ptr()
    assert ["shared" in line for line in reported()] == [False, True]
    x = torch.ones(1, 100, dtype=torch.bfloat16)
    wanted = first.quant_method.apply(first, x)
    del first
    assert torch.equal(second.quant_method.apply(second, x), wanted)


def test_a_head_that_is_gone_is_not_shared(installed) -> None:
    first = new_head()
    fill(first, 500, 100)
    first.quant_method.process_weights_after_loading(first)
    assert len(method._heads) == 1
    del first
    gc.collect()
    assert len(method._heads) == 0


def test_bad_weights_are_reported_as_failure(installed, reported) -> None:
    head = new_head()
    head.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN or infinity"):
        head.quant_method.process_weights_after_loading(head)
    assert [line["event"] for line in reported()] == ["failed"]


def test_tied_head_gets_codes_and_the_embedding_keeps_its_weight(installed, reported) -> None:
    embedding = VocabParallelEmbedding(500, 100, params_dtype=torch.bfloat16)
    head = new_head().tie_weights(embedding)
    weight = fill(embedding, 500, 100)  # loaded after it was tied
    head.quant_method.process_weights_after_loading(head)
    [line] = reported()
    assert line["tied"] is True
    assert torch.equal(embedding(torch.tensor([7])), weight[7:8])
    x = torch.randn(2, 100, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    wanted = x.float() @ weight.float().T
    got = head.quant_method.apply(head, x)[:, :500].float()
    assert float((got - wanted).norm() / wanted.norm()) < 0.01


def test_a_head_that_the_checkpoint_has_quantised_is_left_to_vllm(installed, reported) -> None:
    class Quantised(UnquantizedLinearMethod):
        """Of another type, as that of a checkpoint's format."""

    inner = Quantised()
    assert new_head(quant_config=HeadConfig(inner)).quant_method is inner
    [line] = reported()
    assert (line["event"], line["head"]) == ("off", "Quantised")


def test_lora_is_refused(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "lora_config", LoRAConfig())
    with pytest.raises(ModError, match=r"LoRA.*--enable-lora"):
        new_head()


def test_embeddings_are_left_alone(installed) -> None:
    embedding = VocabParallelEmbedding(500, 100, params_dtype=torch.bfloat16)
    assert type(embedding.quant_method) is UnquantizedEmbeddingMethod


def refusal() -> BaseException | None:
    with pytest.raises(SystemExit) as caught:
        sparkpin_int8_lm_head.register()
    return caught.value.__cause__


def test_changed_signature_stops(pristine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelLMHead, "__init__", lambda self, num_embeddings: None)
    assert isinstance(refusal(), SignatureChanged)


def test_another_platform_stops(pristine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    cause = refusal()
    assert isinstance(cause, UnsupportedPlatform) and "SPARKPIN_MOD_INT8_LM_HEAD=0" in str(cause)
    assert ParallelLMHead.__init__ is pristine


def test_cuda_is_accepted(pristine, world, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    sparkpin_int8_lm_head.register()
    assert isinstance(new_head().quant_method, Int8LMHeadMethod)
