"""The `mtp` step: the index lists every tensor of the multi-token prediction layer.

A loader reads only what the index names, so a copy whose index leaves the MTP tensors out serves without drafts and
says nothing. Copies come in three states: listed, in a file that the index does not name, or without them; then another
repository of the pin may give them. All three end in an index that lists them, or in an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from sparkpin.checkpoint.draft import Draft
from sparkpin.checkpoint.formats import PACKED, SCALE, WEIGHT, check_scale
from sparkpin.checkpoint.patterns import Patterns, some
from sparkpin.checkpoint.quantization import block_of, extra_config_of, fp8_entry
from sparkpin.checkpoint.repository import CONFIG, TensorPlace
from sparkpin.core.errors import CheckpointError
from sparkpin.pins.schema import MtpStep

PREFIX = "mtp."
FC = "mtp.fc.weight"
OUTER = (FC, "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
LAYERS, EXPERTS, HIDDEN = "mtp_num_hidden_layers", "num_experts", "hidden_size"
MATRICES, TOGETHER = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
"""Of an expert each by itself, and of all experts in one tensor each."""

_FUSED = re.compile(rf"\.mlp\.experts\.({'|'.join(TOGETHER)})(\.weight)?$")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)")
_PIN = (
    "choose a base repository with MTP tensors, or an `mtp.source`, in pins/models/; "
    "without any take `mtp` out of the pin and use a stage before mtp"
)


def apply_mtp(draft: Draft, step: MtpStep) -> None:
    """List what is not listed yet. Raises CheckpointError if config or tensors of the MTP layer are missing."""
    patterns = Patterns(step.tensors)
    names = [name for name in draft.names() if patterns.first(name) is not None]
    if not names and step.source:
        names = take(draft, step, patterns)
    hits = {number for name in names for number in patterns.all(name)}
    for number, pattern in enumerate(patterns.patterns):
        if number not in hits:
            where = f" nor of {draft.donors[step.source].origin}" if step.source else ""
            raise CheckpointError(
                f"mtp.tensors: {pattern!r} fits no tensor of {draft.base.origin}{where}, listed or not", next_step=_PIN
            )
    found = {name: draft.source(name) for name in sorted(names)}
    if not step.source and step.file not in draft.base.listing.files:
        held = ", ".join(sorted({file for file, _ in found.values()}))
        raise CheckpointError(
            f"{draft.base.origin}: mtp.file: saw {step.file!r}, wanted a file of it; its MTP tensors are in {held}",
            next_step="correct mtp.file in pins/models/",
        )
    check_layers(draft, found)
    for name, (file, _) in found.items():
        if not draft.is_listed(name):
            draft.listed[name] = file


def take(draft: Draft, step: MtpStep, patterns: Patterns) -> list[str]:
    """Let the file of the step hold the donor's MTP tensors; the config says which of its modules are FP8."""
    donor = draft.donors[step.source or ""]
    if step.file in draft.base.listing.files:
        raise CheckpointError(
            f"{draft.base.origin}: {step.file} is there, without MTP tensors; wanted a name for a new file",
            next_step="correct mtp.file in pins/models/",
        )
    taken = {name: source for name, source in sorted(donor.found.items()) if patterns.first(name) is not None}
    for source in taken.values():
        draft.add(step.file, source, listed=True)
    fp8 = sorted(name.removesuffix(f".{SCALE}") for name in taken if name.endswith(f".{SCALE}"))
    if fp8:
        block, extra_config = block_of(donor), extra_config_of(draft)
        for module in fp8:
            if f"{module}.{WEIGHT}" in taken:  # else `check_layers` says what lacks
                check_scale(donor, taken[f"{module}.{WEIGHT}"].info, taken[f"{module}.{SCALE}"].info, block)
            extra_config[module] = fp8_entry(block)
    return list(taken)


def setting(draft: Draft, key: str) -> Any:
    """A setting of the config, or of its text_config for a multimodal model; None if neither has it."""
    text = draft.config.get("text_config")
    configs: list[Mapping[str, Any]] = [draft.config, text if isinstance(text, dict) else {}]
    return next((config[key] for config in configs if key in config), None)


def check_layers(draft: Draft, found: Mapping[str, tuple[str, TensorPlace]]) -> None:
    """Raises CheckpointError for a layer that the config counts and the tensors do not make."""
    layers = setting(draft, LAYERS)
    if type(layers) is not int or layers < 1:
        seen = "'(missing)'" if layers is None else repr(layers)
        where = f"{draft.base.origin}/{CONFIG}: {LAYERS}"
        raise CheckpointError(f"{where}: saw {seen}, wanted 1 or more", next_step=_PIN)
    missing = [name for name in OUTER if name not in found]
    body = body_modules(draft)
    fp8 = {name.removesuffix(f".{WEIGHT}") for name, (_, source) in found.items() if source.info.dtype == "F8_E4M3"}
    missing += [f"{module}.{SCALE}" for module in sorted(fp8) if f"{module}.{SCALE}" not in found]
    experts = setting(draft, EXPERTS)
    for layer in range(layers):
        prefix = f"{PREFIX}layers.{layer}."
        parts = parts_under(found, prefix)
        missing += [f"{prefix}{name}" for name in missing_modules(parts, body)]
        missing += [f"{prefix}{name}" for name in missing_parts(parts)]
        missing += [f"{prefix}{name}" for name in missing_experts(parts, experts)]
    if missing:
        raise CheckpointError(
            f"{draft.base.origin}: the MTP layer lacks {some(missing)}; saw {len(found)} of its tensors",
            next_step=_PIN,
        )
    check_shapes(draft, found)


def check_shapes(draft: Draft, found: Mapping[str, tuple[str, TensorPlace]]) -> None:
    """Raises CheckpointError for the layer of a model of another size, as far as the config tells sizes."""
    hidden, experts = setting(draft, HIDDEN), setting(draft, EXPERTS)
    for name, (_, source) in found.items():
        shape, wanted = source.info.shape, ""
        if _FUSED.search(name) and shape[:1] != (experts,):
            wanted = f"{EXPERTS} of the config ({experts}) first"
        elif type(hidden) is int and name in OUTER and shape != ((hidden, 2 * hidden) if name == FC else (hidden,)):
            wanted = f"{[hidden, 2 * hidden] if name == FC else [hidden]}, by {HIDDEN} of the config"
        if wanted:
            origin = draft.donors.get(source.repository, draft.base).origin
            raise CheckpointError(f"{origin}: {name}: shape: saw {list(shape)}, wanted {wanted}", next_step=_PIN)


def body_modules(draft: Draft) -> set[str]:
    """The modules, without experts, of the first full-attention layer: an MTP layer is built like one."""
    query = ".self_attn.q_proj."
    names = list(draft.base.listed)
    body = next((name.partition(query)[0] + "." for name in names if query in name and not name.startswith(PREFIX)), "")
    return {module for module in parts_under(names, body) if not is_expert(module)} if body else set()


def parts_under(names: Iterable[str], prefix: str) -> dict[str, set[str]]:
    """module -> last parts of its tensors' names, of what begins with a prefix, which is cut off."""
    parts: dict[str, set[str]] = {}
    for name in names:
        if name.startswith(prefix):
            module, _, part = name.removeprefix(prefix).rpartition(".")
            parts.setdefault(module, set()).add(part)
    return parts


def is_expert(module: str) -> bool:
    return module == "mlp.experts" or module.startswith("mlp.experts.")


def missing_modules(parts: Mapping[str, set[str]], body: set[str]) -> list[str]:
    """Compared by module, since the base may hold `q_proj.qweight` where MTP has `q_proj.weight`."""
    return [f"{module}.*" for module in sorted(body - set(parts))] or ([] if parts else ["*"])


def missing_parts(parts: Mapping[str, set[str]]) -> list[str]:
    """What a module in one of the quantised forms lacks."""
    missing = []
    for module, held in sorted(parts.items()):
        if held & set(PACKED):
            missing += [f"{module}.{part}" for part in ("qweight", "scales") if part not in held]
        elif SCALE in held and WEIGHT not in held:
            missing.append(f"{module}.{WEIGHT}")
    return missing


def missing_experts(parts: Mapping[str, set[str]], count: Any) -> list[str]:
    """All experts that the config counts, each matrix of them, unless they are stored as one tensor each matrix."""
    if type(count) is not int:
        return []
    together = {name for name in TOGETHER if name in parts.get("mlp.experts", ()) or f"mlp.experts.{name}" in parts}
    if together:
        return [f"mlp.experts.{name}" for name in TOGETHER if name not in together]
    held = {match.groups() for module in parts if (match := _EXPERT.fullmatch(module))}
    wanted = ((str(number), matrix) for number in range(count) for matrix in MATRICES)
    return [f"mlp.experts.{number}.{matrix}.*" for number, matrix in wanted if (number, matrix) not in held]
