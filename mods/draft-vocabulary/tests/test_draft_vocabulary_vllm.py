"""The hook, the refusals and the drafter's best token, on vLLM's own head, logits processor and mixin."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sparkpin_draft_vocabulary
import sparkpin_int8_lm_head
import torch
from sparkpin_draft_vocabulary import hook
from sparkpin_draft_vocabulary.head import ROWS_MULTIPLE
from sparkpin_int8_lm_head import int4, naive
from sparkpin_modkit import ModError, SignatureChanged, UnsupportedPlatform
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import LocalArgmaxMixin
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

VOCABULARY, WIDTH = 500, 100
SPECIAL = (490, 499)
CPU = torch.device("cpu")


class Drafter(LocalArgmaxMixin, torch.nn.Module):
    """What the mod needs of an MTP layer: its target's head."""

    def __init__(self, head: ParallelLMHead) -> None:
        super().__init__()
        self.lm_head = head
        self.logits_processor = LogitsProcessor(VOCABULARY)


@pytest.fixture
def pristine(monkeypatch: pytest.MonkeyPatch, unregistered: None) -> Any:
    from sparkpin_int8_lm_head import method

    for owner, name in ((SpecDecodeBaseProposer, "load_model"), (ParallelLMHead, "__init__")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, getattr(original, "__wrapped__", original))
    monkeypatch.setattr(method, "_heads", weakref.WeakSet())
    return SpecDecodeBaseProposer.load_model


@pytest.fixture
def config(tmp_path: Path) -> Any:
    return settings(tmp_path, SPECIAL, {"first": 40})


def settings(folder: Path, tokens: Sequence[int], listed: dict[str, Any]) -> Any:
    """vLLM's configuration, as far as the mod reads it. tokens: drafted always; listed: drafted, too."""
    text = json.dumps({"added_tokens": [{"id": token, "content": f"<{token}>"} for token in tokens]})
    (folder / "tokenizer.json").write_text(text)
    return SimpleNamespace(
        additional_config={"draft_vocabulary": listed},
        model_config=SimpleNamespace(model=str(folder), tokenizer=str(folder), skip_tokenizer_init=False),
        speculative_config=SimpleNamespace(draft_sample_method="greedy", use_local_argmax_reduction=True),
    )


def whole_head() -> tuple[ParallelLMHead, torch.Tensor]:
    head = ParallelLMHead(VOCABULARY, WIDTH, params_dtype=torch.bfloat16)
    weight = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    weight[:, 5] *= 8  # an outlier column for INT8
    head.weight.weight_loader(head.weight, weight)
    return head, weight


def loaded(kind: str) -> tuple[ParallelLMHead, torch.Tensor]:
    """A head as a server has it: in INT8, in 16 bits, or packed for a CPU, where its weight is gone."""
    if kind == "int8":
        sparkpin_int8_lm_head.register()
    head, weight = whole_head()
    if kind == "packed":
        head.quant_method = UnquantizedLinearMethod()
    head.quant_method.process_weights_after_loading(head)
    if kind == "packed" and head.weight.numel():  # what vLLM does depends on the CPU
        kept = head.weight.data.clone()
        head.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, kept, bias)
        head.weight = torch.nn.Parameter(kept[:0], requires_grad=False)
    return head, weight


def hidden(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)


@pytest.mark.parametrize("kind", ["bfloat16", "packed", "int8"])
def test_the_best_of_the_listed_tokens(kind, pristine, world, config, reported) -> None:
    head, _ = loaded(kind)
    drafter, x = Drafter(head), hidden(64)
    logits = drafter.logits_processor(head, x)
    hook.restrict(drafter, config, CPU)

    listed = torch.tensor([*range(40), *SPECIAL])
    wanted = listed[logits[:, listed].argmax(1)]
    got = drafter.get_top_tokens(x)
    assert got.dtype == torch.int64 and torch.equal(got, wanted)
    assert len(set(got.tolist()) - set(SPECIAL)) > 10
    assert not torch.equal(got, logits.argmax(1))  # the best of all tokens is often another
    assert torch.equal(drafter.logits_processor(head, x), logits)  # the target's head stays whole

    line = reported()[-1]
    assert {key: line[key] for key in ("mod", "event", "list", "tokens", "of", "special")} == {
        "mod": "draft-vocabulary", "event": "active", "list": "first 40", "tokens": 42, "of": VOCABULARY, "special": 2,
    }  # fmt: skip
    rows = {"bfloat16": "bfloat16", "packed": "the whole head, then the list", "int8": "Int8LMHeadMethod"}
    assert line["rows"] == rows[kind]
    int8 = 128 * ROWS_MULTIPLE + 2 * (ROWS_MULTIPLE + WIDTH)
    sizes = {"bfloat16": 2 * WIDTH * ROWS_MULTIPLE, "packed": 0, "int8": int8}
    assert line["mib"] == round(sizes[kind] / 2**20, 3)
    assert drafter.state_dict().keys() <= {"lm_head.weight"}  # the table and the rows come from no checkpoint


@pytest.mark.parametrize(("listed", "tokens"), [(None, VOCABULARY), ({"first": 40}, 42)], ids=["all", "list"])
def test_the_best_of_rows_in_4_bits(listed, tokens, pristine, world, config, reported) -> None:
    head, _ = loaded("int8")
    drafter, x = Drafter(head), hidden(64)
    logits = drafter.logits_processor(head, x)
    config.additional_config = {"draft_head": {"bits": 4}} | ({"draft_vocabulary": listed} if listed else {})
    hook.restrict(drafter, config, CPU)

    chosen = torch.arange(VOCABULARY) if listed is None else torch.tensor([*range(40), *SPECIAL])
    numbers, scale = int4.quantise(head.weight_int8[chosen, :WIDTH], head.weight_row_scale[chosen])
    wanted = naive.logits(x, numbers, scale, head.weight_column_scale.float())
    near = wanted.topk(2, dim=1).values
    clear = near[:, 0] - near[:, 1] > 0.02 * near[:, 0].abs()  # the CPU's are bfloat16
    got = drafter.get_top_tokens(x)
    assert int(clear.sum()) > 40 and torch.equal(got[clear], chosen[wanted.argmax(1)][clear])
    same = float((got == chosen[logits[:, chosen].argmax(1)]).float().mean())
    assert 0.5 < same < 1  # of random rows, whose logits lie close to each other
    assert torch.equal(drafter.logits_processor(head, x), logits)
    line = reported()[-1]
    assert (line["tokens"], line["of"], line["rows"]) == (tokens, VOCABULARY, "Int8LMHeadMethod, 4 bits")


def test_ends_of_answers_are_listed_without_a_tokenizer(pristine, world, config, tmp_path) -> None:
    """As where a server takes token ids only (skip_tokenizer_init)."""
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "config.json").write_text('{"eos_token_id": 480}')
    drafter = Drafter(loaded("bfloat16")[0])
    with pytest.raises(ModError, match=r"tokenizer\.json"):
        hook.restrict(drafter, config, CPU)
    config.model_config.skip_tokenizer_init = True
    hook.restrict(drafter, config, CPU)
    assert 480 in (torch.arange(64) + drafter.draft_id_to_target_id).tolist()


def change(config: Any, drafter: Any, what: str) -> None:
    match what:
        case "probabilistic":
            config.speculative_config.draft_sample_method = "probabilistic"
        case "all logits":
            config.speculative_config.use_local_argmax_reduction = False
        case "no mixin":
            drafter.__class__ = torch.nn.Module
        case "own table":
            drafter.draft_id_to_target_id = torch.zeros(4)
        case "4 bits":
            config.additional_config = {"draft_head": {"bits": 4}}
        case "quantised":
            drafter.lm_head.quant_method = SimpleNamespace(apply=None)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("probabilistic", "draft_sample_method: got 'probabilistic', expected 'greedy'"),
        ("all logits", "use_local_argmax_reduction: got false, expected true"),
        ("no mixin", "names its best token in its own way"),
        ("own table", "has a smaller vocabulary already"),
        ("4 bits", "draft_head: the LM head is UnquantizedEmbeddingMethod's, expected int8-lm-head's"),
        ("quantised", "is quantised (SimpleNamespace), expected a 16-bit one or int8-lm-head's"),
    ],
)  # fmt: skip
def test_what_is_refused(what, said, pristine, world, config) -> None:
    drafter = Drafter(loaded("bfloat16")[0])
    head = drafter.lm_head
    change(config, drafter, what)
    with pytest.raises(ModError) as caught:
        hook.restrict(drafter, config, CPU)
    assert said in str(caught.value) and "SPARKPIN_MOD_DRAFT_VOCABULARY=0" in str(caught.value)
    assert drafter.lm_head is head


def test_a_drafter_is_changed_when_vllm_has_loaded_it(pristine, world, config, monkeypatch, reported) -> None:
    monkeypatch.setattr(SpecDecodeBaseProposer, "load_model", load_model)
    sparkpin_draft_vocabulary.register()
    target = torch.nn.Module()
    target.lm_head, _ = loaded("bfloat16")
    proposer = SimpleNamespace(vllm_config=config, device=CPU)
    SpecDecodeBaseProposer.load_model(proposer, target)
    assert proposer.model.lm_head is not target.lm_head
    config.additional_config = {}
    with pytest.raises(ModError):
        SpecDecodeBaseProposer.load_model(proposer, target)
    assert [line["event"] for line in reported()] == ["active", "failed"]


def load_model(self: Any, target_model: Any) -> None:
    self.model = Drafter(target_model.lm_head)


def test_on_wraps_once(pristine, world) -> None:
    sparkpin_draft_vocabulary.register()
    wrapped = SpecDecodeBaseProposer.load_model
    assert wrapped is not pristine
    sparkpin_draft_vocabulary.register()
    assert SpecDecodeBaseProposer.load_model is wrapped


def test_off_leaves_vllm_alone(pristine, monkeypatch) -> None:
    monkeypatch.setenv("SPARKPIN_MOD_DRAFT_VOCABULARY", "0")
    sparkpin_draft_vocabulary.register()
    assert SpecDecodeBaseProposer.load_model is pristine


def refusal() -> BaseException | None:
    with pytest.raises(SystemExit) as caught:
        sparkpin_draft_vocabulary.register()
    assert caught.value.code == 78
    return caught.value.__cause__


def test_changed_signature_stops(pristine, monkeypatch) -> None:
    monkeypatch.setattr(LocalArgmaxMixin, "get_top_tokens", lambda self, hidden_states, step: None)
    assert isinstance(refusal(), SignatureChanged)
    assert SpecDecodeBaseProposer.load_model is pristine


def test_another_platform_stops(pristine, world, monkeypatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    cause = refusal()
    assert isinstance(cause, UnsupportedPlatform) and "SPARKPIN_MOD_DRAFT_VOCABULARY=0" in str(cause)


def test_both_model_runners_are_meant_on_cuda(pristine, world, monkeypatch) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(DraftModelSpeculator, "load_model", DraftModelSpeculator.load_model)
    original = DraftModelSpeculator.load_model
    sparkpin_draft_vocabulary.register()
    assert DraftModelSpeculator.load_model.__wrapped__ is original
    assert SpecDecodeBaseProposer.load_model.__wrapped__ is pristine
