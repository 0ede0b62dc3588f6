"""vLLM loads some modules as one layer, so their weights must be in one format."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sparkpin.checkpoint.draft import Draft
from sparkpin.core.errors import CheckpointError

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Modules of one parent that vLLM 0.32 loads as one linear layer: qkv, gate_up, in_proj_qkvz, in_proj_ba."""

_EXPERT = re.compile(r"(.*\.experts)\.\d+\..*", re.DOTALL)


def check_fused(changed: Mapping[str, str], draft: Draft) -> None:
    """changed: module -> its new format. Raises CheckpointError for a layer whose parts would differ.

    All experts of a layer are one layer of vLLM, whose three matrices are in one format, too.
    """
    experts = {match[1] for module in changed if (match := _EXPERT.fullmatch(module))}
    for module, form in changed.items():
        parent, _, last = module.rpartition(".")
        if _EXPERT.fullmatch(module):
            continue
        for group in FUSED:
            for sibling in (f"{parent}.{part}" for part in group if last in group and part != last):
                check_pair(module, form, sibling, changed.get(sibling) or form_in_base(sibling, draft))
    if not experts:
        return
    first: dict[str, tuple[str, str]] = {}
    for module in expert_modules(draft, experts):
        form = changed.get(module) or form_in_base(module, draft) or ""
        known, known_form = first.setdefault(module.rpartition(".experts.")[0], (module, form))
        check_pair(known, known_form, module, form)


def check_pair(one: str, form: str, other: str, other_form: str | None) -> None:
    if other_form is not None and form != other_form:
        raise CheckpointError(
            f"hybrid.rules or mtp.rules: vLLM loads {one} and {other} as one layer, "
            f"but they would hold {form} and {other_form}",
            next_step="let one of the rules in pins/models/ fit all parts of the layer",
        )


def form_in_base(module: str, draft: Draft) -> str | None:
    """int4, fp8 or plain; None if the base has no such module."""
    forms = (("qweight", "int4"), ("weight_scale_inv", "fp8"), ("weight", "plain"))
    return next((form for part, form in forms if draft.base.file_of(f"{module}.{part}")), None)


def expert_modules(draft: Draft, layers: set[str]) -> list[str]:
    """The modules of all experts of some layers, sorted."""
    names = (name.rpartition(".")[0] for names in (draft.base.listed, draft.base.unlisted) for name in names)
    return sorted({name for name in names if (match := _EXPERT.fullmatch(name)) and match[1] in layers})
