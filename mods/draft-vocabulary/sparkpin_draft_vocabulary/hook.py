"""Give an MTP drafter a part of its head once it is loaded, and the table that leads back to tokens.

For the releases in touches.py. vLLM has drafters whose vocabulary is smaller than their target's: `LocalArgmaxMixin`
takes the best row of the drafter's head and adds ``draft_id_to_target_id`` to it. An MTP layer shares its target's
head; here it gets a part of it. May go when vLLM can cut a shared head itself.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from sparkpin_modkit import ModError, UnsupportedPlatform, check_vllm, report, reporting_failure

from sparkpin_draft_vocabulary import MOD, VERSION, states
from sparkpin_draft_vocabulary.touches import ON_CUDA, STATES_IN, TOUCHES

MIB = 2**20
ARGMAX = "--speculative-config '{\"use_local_argmax_reduction\": true, ...}'"


def install() -> None:
    """Wrap what loads a drafter, in the model runners that the platform may take."""
    check_vllm(TOUCHES)
    from vllm.platforms import current_platform
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise UnsupportedPlatform(
            f"draft-vocabulary was tried on vLLM's CPU and CUDA platforms, this is {current_platform.device_type!r}: "
            "set SPARKPIN_MOD_DRAFT_VOCABULARY=0"
        )
    if current_platform.is_cuda():
        if check_vllm(ON_CUDA) in STATES_IN:
            states.install()
        from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

        DraftModelSpeculator.load_model = wrapped(DraftModelSpeculator.load_model)
    SpecDecodeBaseProposer.load_model = wrapped(SpecDecodeBaseProposer.load_model)


def wrapped(load_model: Any) -> Any:
    @functools.wraps(load_model)
    def load(self: Any, target_model: Any) -> None:
        load_model(self, target_model)
        with reporting_failure(MOD, version=VERSION):
            restrict(self.model, self.vllm_config, self.device)
            states.check(self.vllm_config)

    return load


def restrict(model: Any, config: Any, device: Any) -> None:
    """The drafter's head becomes the rows of the listed tokens; its target's stays whole.

    Raises:
        ModError: the drafter, its settings or the list are none that this can be done for.
    """
    import torch

    from sparkpin_draft_vocabulary.head import Rows
    from sparkpin_draft_vocabulary.tokens import drafted, ends, read_setting, special_tokens

    setting = read_setting(config.additional_config)
    refuse(model, config)
    head, vocabulary = model.lm_head, model.logits_processor.org_vocab_size
    always = ends(Path(config.model_config.model)) if setting.first else set()
    if setting.first and not config.model_config.skip_tokenizer_init:
        always |= special_tokens(Path(config.model_config.tokenizer))
    tokens = drafted(setting, vocabulary, always)
    with torch.no_grad():
        model.lm_head = rows = Rows(head, tokens, device, setting.bits)
    model.register_buffer("draft_id_to_target_id", rows.offsets, persistent=False)
    report(
        MOD,
        "active",
        version=VERSION,
        list=str(setting),
        tokens=len(tokens),
        of=vocabulary,
        special=len(always),
        **({"own": rows.own, "shards": rows.tp_size} if rows.tp_size > 1 else {}),
        rows=rows.kind,
        mib=round(rows.nbytes / MIB, 3),
    )


def refuse(model: Any, config: Any) -> None:
    from vllm.model_executor.models.interfaces import LocalArgmaxMixin

    off = "set SPARKPIN_MOD_DRAFT_VOCABULARY=0"
    speculative = config.speculative_config
    if speculative.draft_sample_method == "probabilistic":
        raise ModError(
            "draft-vocabulary: --speculative-config: draft_sample_method: got 'probabilistic', expected 'greedy', "
            f"since the logits of all tokens would be needed; leave it out or {off}"
        )
    if not speculative.use_local_argmax_reduction:
        raise ModError(
            "draft-vocabulary: --speculative-config: use_local_argmax_reduction: got false, expected true, which has "
            f"vLLM ask the drafter for its best token in place of all logits: {ARGMAX}, or {off}"
        )
    name = type(model).__name__
    if not isinstance(model, LocalArgmaxMixin) or type(model).get_top_tokens is not LocalArgmaxMixin.get_top_tokens:
        raise ModError(f"draft-vocabulary: the drafter {name} names its best token in its own way; {off}")
    if getattr(model, "draft_id_to_target_id", None) is not None:
        raise ModError(f"draft-vocabulary: the drafter {name} has a smaller vocabulary already; {off}")
