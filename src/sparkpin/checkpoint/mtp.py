"""The `mtp` step: the index lists every tensor of the multi-token prediction layer.

A loader reads only what the index names, so a copy whose index leaves the MTP tensors out serves without drafts and
without a warning. Copies come in three states: listed, in a file that the index does not name, or without them; then
another repository of the pin may give them. All three end in an index that lists them, or in an error.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Mapping
from typing import Any

from sparkpin.checkpoint import formats
from sparkpin.checkpoint.draft import Draft
from sparkpin.checkpoint.formats import PACKED, SCALE, WEIGHT, Patterns
from sparkpin.checkpoint.repository import CONFIG, TensorPlace
from sparkpin.core.errors import CheckpointError
from sparkpin.pins.schema import MtpStep

PREFIX = "mtp."
OUTER = ("mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
LAYERS, EXPERTS = "mtp_num_hidden_layers", "num_experts"
MATRICES, TOGETHER = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
"""Of an expert each by itself, and of all experts in one tensor each."""

_QUERY = ".self_attn.q_proj."
_PIN = (
    "choose a base repository with MTP tensors, or an `mtp.source`, in pins/models/; "
    "without any take `mtp` out of the pin and use a stage before mtp"
)


def apply_mtp(draft: Draft, step: MtpStep) -> None:
    """List what is not listed yet. Raises CheckpointError if config or tensors of the MTP layer are missing."""
    patterns, base = Patterns(step.tensors), draft.base
    names = {name for name in draft.names() if patterns.all(name)}
    if not names and step.source:
        names = take(draft, step, patterns)
    if unfit := next((pattern for pattern in step.tensors if not fnmatch.filter(names, pattern)), None):
        where = f" nor of {draft.donors[step.source].origin}" if step.source else ""
        cause = f"mtp.tensors: {unfit!r} fits no tensor of {base.origin}{where}, listed or not"
        raise CheckpointError(cause, next_step=_PIN)
    new = draft.new()
    found = {name: new[name] if name in new else (base.found[name].file, base.found[name]) for name in sorted(names)}
    if not step.source and step.file not in base.listing.files:
        files = ", ".join(sorted({file for file, _ in found.values()}))
        cause = f"mtp.file: got {step.file!r}, expected a file of it; its MTP tensors are in {files}"
        raise CheckpointError(f"{base.origin}: {cause}", next_step="correct mtp.file in pins/models/")
    check_layers(draft, {name: place for name, (_, place) in found.items()})
    draft.listed |= {name: file for name, (file, _) in found.items() if not draft.is_listed(name)}


def take(draft: Draft, step: MtpStep, patterns: Patterns) -> set[str]:
    """Let the file of the step hold the donor's MTP tensors; the config gets those of its modules that are FP8."""
    donor = draft.donors[step.source or ""]
    if step.file in draft.base.listing.files:
        cause = f"mtp.file: got {step.file}, which is there without MTP tensors, expected the name of a new file"
        raise CheckpointError(f"{draft.base.origin}: {cause}", next_step="correct mtp.file in pins/models/")
    donated = {name: place for name, place in sorted(donor.found.items()) if patterns.all(name)}
    for place in donated.values():
        draft.add(step.file, place, listed=True)
    if fp8 := [name.removesuffix(f".{SCALE}") for name in donated if name.endswith(f".{SCALE}")]:
        block, extra_config = formats.block_of(donor), formats.extra_config_of(draft)
        for module in fp8:
            if weight := donated.get(f"{module}.{WEIGHT}"):  # if it is missing, `check_layers` finds that
                formats.check_scale(donor, weight.info, donated[f"{module}.{SCALE}"].info, block)
            extra_config[module] = formats.fp8_entry(block)
    return set(donated)


def setting(draft: Draft, key: str) -> Any:
    """A setting of the config, or of its text_config for a multimodal model; None if neither has it."""
    text = draft.config.get("text_config")
    configs: list[Mapping[str, Any]] = [draft.config, text if isinstance(text, dict) else {}]
    return next((config[key] for config in configs if key in config), None)


def check_layers(draft: Draft, found: Mapping[str, TensorPlace]) -> None:
    """Raises CheckpointError for a layer that the config counts and whose tensors are not all there."""
    layers = setting(draft, LAYERS)
    if type(layers) is not int or layers < 1:
        where = f"{draft.base.origin}/{CONFIG}: {LAYERS}"
        raise CheckpointError(f"{where}: got {layers!r}, expected 1 or more", next_step=_PIN)
    missing = [name for name in OUTER if name not in found]
    for name, place in found.items():
        module, _, part = name.rpartition(".")
        pieces = ["qweight", "scales"] if part in PACKED else [WEIGHT] if part == SCALE else []
        pieces += [SCALE] if part == WEIGHT and place.info.dtype == "F8_E4M3" else []
        missing += [f"{module}.{piece}" for piece in pieces if f"{module}.{piece}" not in {*found, *missing}]
    for layer in range(layers):
        prefix = f"{PREFIX}layers.{layer}."
        names = {name.removeprefix(prefix) for name in found if name.startswith(prefix)}
        modules = {*names, *(name.rpartition(".")[0] for name in names)}
        expected = needed_modules(draft, modules) if names else [""]
        missing += [f"{prefix}{module}" for module in expected if module not in modules]
    if missing:
        first = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        cause = f"the MTP layer lacks {first}; got {len(found)} of its tensors"
        raise CheckpointError(f"{draft.base.origin}: {cause}", next_step=_PIN)


def needed_modules(draft: Draft, there: Container[str]) -> list[str]:
    """An MTP layer is built like the first full-attention layer; and it has the experts that the config counts, each
    matrix by itself or that of all experts in one tensor. By module, since the base may hold `q_proj.qweight` where MTP
    has `q_proj.weight`."""
    names, count = draft.base.listed, setting(draft, EXPERTS)
    body = next((name.partition(_QUERY)[0] for name in names if _QUERY in name and not name.startswith(PREFIX)), None)
    modules = {name.removeprefix(f"{body}.").rpartition(".")[0] for name in names if name.startswith(f"{body}.")}
    needed = sorted(module for module in modules if not f"{module}.".startswith("mlp.experts."))
    joined = [f"mlp.experts.{matrix}" for matrix in TOGETHER]
    if type(count) is not int or any(matrix in there for matrix in joined):
        return [*needed, *(joined if type(count) is int else [])]
    return [*needed, *(f"mlp.experts.{number}.{matrix}" for number in range(count) for matrix in MATRICES)]
