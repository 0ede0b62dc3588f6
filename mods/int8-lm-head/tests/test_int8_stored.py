"""A head that the project's checkpoint builder stored in INT8: its bytes, and how vLLM's head loads them.

Needs the project's `src` on PYTHONPATH, for the builder, which has no torch.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import sparkpin_int8_lm_head
import torch
from sparkpin_int8_lm_head import method, stored
from sparkpin_int8_lm_head.quantise import ALPHAS, GAIN, ROOT_OF_2, quantise_head
from sparkpin_modkit import ModError
from sparkpin_modkit.testing import parse_reports
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader, StageMissingLayer, no_init_weights

from sparkpin.checkpoint import int8_head, int8_quantiser
from sparkpin.core.errors import CheckpointError

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16"}
SHAPES = [(1, 1), (7, 33), (500, 100), (1001, 130), (9000, 40), (64, 3072)]


def weights(rows: int, columns: int, dtype: torch.dtype, outliers: float = 0.0) -> torch.Tensor:
    """Columns of sizes that differ, so that many scales are candidates; one row of zeros; one column far out."""
    generator = torch.Generator().manual_seed(rows * 7 + columns)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    weight *= torch.exp(outliers * torch.randn(columns, generator=generator))
    weight[rows // 2] = 0
    if rows > 3:
        weight[0] *= 127 / weight[0].abs().max()  # a scale of exactly 1
    return weight.to(dtype)


def built(weight: torch.Tensor, folder: Path) -> dict[str, torch.Tensor]:
    """What the builder stores."""
    rows, columns = weight.shape
    file = folder / "head"
    file.write_bytes(b"before" + weight.view(torch.int16).numpy().tobytes())
    made = int8_quantiser.Int8Head(file, 6, DTYPES[weight.dtype], rows, columns)
    parts = {
        "weight_int8": (made.codes, torch.int8, (rows, columns)),
        "weight_row_scale": (made.row_scale, weight.dtype, (rows,)),
        "weight_column_scale": (made.column_scale, weight.dtype, (columns,)),
    }
    return {
        name: torch.frombuffer(bytearray(b"".join(chunks())), dtype=dtype).view(shape)
        for name, (chunks, dtype, shape) in parts.items()
    }


@pytest.mark.parametrize("outliers", [0.0, 0.3, 1.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES, ids=lambda n: str(n))
def test_the_builder_stores_what_the_mod_would_make(rows, columns, dtype, outliers, tmp_path: Path) -> None:
    weight = weights(rows, columns, dtype, outliers)
    wanted, got = quantise_head(weight), built(weight, tmp_path)
    for name, tensor in zip(stored.NAMES, (wanted.q, wanted.row_scale, wanted.column_scale), strict=True):
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def test_some_of_these_heads_have_scaled_columns() -> None:
    alphas = {quantise_head(weights(*shape, torch.bfloat16, 1.5)).alpha for shape in SHAPES}
    assert len(alphas - {None}) > 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_builder_refuses_what_the_mod_refuses(dtype: torch.dtype, bad: float, tmp_path: Path) -> None:
    weight = weights(5000, 64, dtype)
    weight[4500, 3] = bad
    with pytest.raises(CheckpointError, match=r"NaN or infinity in row 4500"):
        built(weight, tmp_path)


def test_what_stands_in_both_is_the_same() -> None:
    assert (int8_quantiser.ALPHAS, int8_quantiser.GAIN, int8_quantiser.ROOT_OF_2) == (ALPHAS, GAIN, ROOT_OF_2)
    assert (int8_head.SETTING, int8_head.FORMAT) == (stored.SETTING, stored.FORMAT)
    names = (int8_head.CODES, int8_head.ROW_SCALE, int8_head.COLUMN_SCALE)
    assert names == tuple(f"lm_head.{name}" for name in stored.NAMES)


@pytest.fixture
def world(world, unregistered, monkeypatch: pytest.MonkeyPatch):
    """vLLM with the mod, about to make a model whose head is stored in INT8."""
    original = ParallelLMHead.__init__
    monkeypatch.setattr(ParallelLMHead, "__init__", getattr(original, "__wrapped__", original))
    monkeypatch.setattr(ParallelLMHead, "tie_weights", ParallelLMHead.tie_weights)
    monkeypatch.setattr(method, "_heads", weakref.WeakSet())
    monkeypatch.setattr("sparkpin_modkit.reports._vllm_logger", lambda: None)
    say(world, monkeypatch, {"format": 1})
    sparkpin_int8_lm_head.register()
    return world


def say(world, monkeypatch: pytest.MonkeyPatch, setting: object) -> None:
    config = SimpleNamespace(hf_config=SimpleNamespace(**{stored.SETTING: setting} if setting else {}), head_dtype=None)
    monkeypatch.setattr(world, "model_config", config)


class Model(torch.nn.Module):
    def __init__(self, vocabulary: int = 500, width: int = 100, **kwargs) -> None:
        super().__init__()
        self.lm_head = ParallelLMHead(vocabulary, width, **{"params_dtype": torch.bfloat16, **kwargs})

    def load(self, tensors: dict[str, torch.Tensor]) -> ParallelLMHead:
        """As vLLM's models do."""
        loaded = AutoWeightsLoader(self).load_weights((f"lm_head.{name}", tensor) for name, tensor in tensors.items())
        assert loaded == {f"lm_head.{name}" for name in tensors}
        self.lm_head.quant_method.process_weights_after_loading(self.lm_head)
        return self.lm_head


def test_a_pooling_model_keeps_no_memory_for_it(world, capfd) -> None:
    """An embedding model made of a generating one: vLLM neither loads its head nor computes it."""
    model = torch.nn.Module()
    with no_init_weights(model, partial(StageMissingLayer, "output"), targets=(ParallelLMHead,)):
        model.lm_head = ParallelLMHead(500, 100, params_dtype=torch.bfloat16)
    memory = weakref.ref(model.lm_head.quant_method.codes.untyped_storage())
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    gc.collect()
    assert memory() is None and parse_reports(capfd.readouterr().err) == []


def at_load(world, monkeypatch: pytest.MonkeyPatch, weight: torch.Tensor) -> ParallelLMHead:
    """The head that 16-bit weights become."""
    say(world, monkeypatch, None)
    head = Model(*weight.shape, params_dtype=weight.dtype).load({"weight": weight})
    say(world, monkeypatch, {"format": 1})
    return head


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_computes_what_the_head_of_16_bits_becomes(world, dtype, monkeypatch, capfd, tmp_path: Path) -> None:
    weight = weights(500, 100, dtype, 1.5)
    wanted = at_load(world, monkeypatch, weight)
    head = Model(params_dtype=dtype).load(built(weight, tmp_path))
    assert not list(head.parameters()) and head.weight.numel() == 1
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(4)).to(dtype)
    assert torch.equal(head.quant_method.apply(head, x), wanted.quant_method.apply(wanted, x))
    processor = LogitsProcessor(500)
    assert torch.equal(processor(head, x), processor(wanted, x))
    first, second = parse_reports(capfd.readouterr().err)
    assert second["stored"] is True and "stored" not in first and "weight_error" not in second
    same = ("V", "K", "kernel", "mib_before", "mib_after", "outlier_columns")
    assert [second[key] for key in same] == [first[key] for key in same]


def test_nothing_in_16_bits_is_kept_for_it(world) -> None:
    head = Model().lm_head
    assert {name: (p.dtype, tuple(p.shape)) for name, p in head.named_parameters()} == {
        "weight_int8": (torch.int8, (512, 100)),
        "weight_row_scale": (torch.bfloat16, (512,)),
        "weight_column_scale": (torch.bfloat16, (100,)),
    }


def test_a_drafter_s_copy_takes_no_memory(world, capfd, tmp_path: Path) -> None:
    tensors = built(weights(500, 100, torch.bfloat16), tmp_path)
    first, second = (Model().load(tensors) for _ in range(2))
    assert first.weight_int8.data_ptr() == second.weight_int8.data_ptr()
    assert ["shared" in line for line in parse_reports(capfd.readouterr().err)] == [False, True]


def test_each_rank_of_a_tensor_parallel_server_takes_its_rows(world, monkeypatch, tmp_path: Path) -> None:
    """300 of 500 tokens' rows on the second of two ranks would be too many: vLLM pads 500 to 512 and halves that."""
    weight = weights(500, 100, torch.bfloat16, 1.5)
    tensors = built(weight, tmp_path)
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    whole = Model().load(tensors)
    wanted = whole.quant_method.apply(whole, x)
    monkeypatch.setattr(vocab_parallel_embedding, "get_tensor_model_parallel_world_size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(vocab_parallel_embedding, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        head = Model().load(tensors)
        assert head.weight_int8.shape[0] == 256
        assert torch.equal(head.quant_method.apply(head, x), wanted[:, 256 * rank : 256 * rank + 256])


def test_a_bias_stays_in_16_bits(world, tmp_path: Path) -> None:
    tensors = built(weights(500, 100, torch.bfloat16), tmp_path)
    plain, head = Model().load(tensors), Model(bias=True).load({**tensors, "bias": torch.arange(500).bfloat16()})
    x = torch.ones(1, 100, dtype=torch.bfloat16)
    wanted = plain.quant_method.apply(plain, x)[:, :500] + torch.arange(500).bfloat16()
    assert torch.equal(head.quant_method.apply(head, x, head.bias)[:, :500], wanted)


@pytest.mark.parametrize("lacks", stored.NAMES)
def test_a_tensor_that_is_missing_stops_the_server(world, lacks: str, capfd, tmp_path: Path) -> None:
    tensors = built(weights(500, 100, torch.bfloat16), tmp_path)
    del tensors[lacks]
    with pytest.raises(ModError, match=rf"saw lm_head\.{lacks} missing"):
        Model().load(tensors)
    assert [line["event"] for line in parse_reports(capfd.readouterr().err)] == ["failed"]


def test_a_checkpoint_without_any_of_them_stops_the_server(world) -> None:
    with pytest.raises(ModError, match="weight_column_scale missing"):
        Model().load({})


def test_a_drafter_without_a_head_leaves_none(world, tmp_path: Path) -> None:
    """vLLM makes it while the model's own config is the current one, so as a stored head; the target's is there."""
    target = Model().load(built(weights(500, 100, torch.bfloat16, 1.5), tmp_path))
    empty = Model().lm_head
    empty.quant_method.process_weights_after_loading(empty)
    assert not list(empty.parameters()) and not torch.equal(empty.weight, target.weight)


def test_dummy_weights_go_through(world) -> None:
    """vllm serve --load-format dummy fills what is floating point."""
    model = Model()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.uniform_(-1e-3, 1e-3)
    model.load({})


def test_another_type_than_it_was_made_for_is_refused(world, tmp_path: Path) -> None:
    with pytest.raises(ModError, match=r"is torch\.float16, wanted torch\.bfloat16, .*--dtype"):
        Model().load(built(weights(500, 100, torch.float16), tmp_path))


def test_scales_that_are_no_numbers_are_refused(world, tmp_path: Path) -> None:
    tensors = built(weights(500, 100, torch.bfloat16), tmp_path)
    tensors["weight_row_scale"][3] = torch.inf
    with pytest.raises(ModError, match="scales with infinity or NaN"):
        Model().load(tensors)


def test_a_tied_head_is_refused(world) -> None:
    with pytest.raises(ModError, match="tie_word_embeddings: saw true"):
        Model().lm_head.tie_weights(VocabParallelEmbedding(500, 100, params_dtype=torch.bfloat16))


def test_another_form_is_refused(world, monkeypatch: pytest.MonkeyPatch) -> None:
    say(world, monkeypatch, {"format": 2})
    with pytest.raises(ModError, match=r"saw \{'format': 2\}, wanted \{'format': 1\}"):
        Model()


def test_vllm_without_the_mod_stops_at_the_first_tensor(world, monkeypatch, tmp_path: Path) -> None:
    """It must not serve with a head of whatever the memory held."""
    monkeypatch.setattr(ParallelLMHead, "__init__", ParallelLMHead.__init__.__wrapped__)
    with pytest.raises(ValueError, match=r"no module or parameter named 'lm_head\.weight_int8'"):
        Model().load(built(weights(500, 100, torch.bfloat16), tmp_path))
