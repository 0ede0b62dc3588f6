"""The `hybrid` step: which modules of an INT4 checkpoint hold FP8 or plain weights of another repository.

A module (`model.layers.0.mlp.gate_proj`) is in one of three forms. int4: `qweight`, `qzeros`, `scales` (and `g_idx`) of
AutoRound; fp8: `weight` (F8_E4M3) and `weight_scale_inv`, where value = weight * weight_scale_inv, one scale for each
block (DeepSeek-V3's format, as published for Qwen's FP8 repositories); plain: `weight` in BF16, F16 or F32. What a rule
gives comes into the shard of what it takes away, and `quantization_config.extra_config` says so for the module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sparkpin.checkpoint.draft import Draft
from sparkpin.checkpoint.fused import check_fused
from sparkpin.checkpoint.patterns import Patterns
from sparkpin.checkpoint.quantization import PLAIN_ENTRY, check_source_config, extra_config_of, fp8_entry
from sparkpin.checkpoint.repository import CONFIG, ReadRepository, TensorPlace
from sparkpin.checkpoint.safetensors import TensorInfo
from sparkpin.core.errors import CheckpointError
from sparkpin.pins.schema import FormatRule

WEIGHT, SCALE = "weight", "weight_scale_inv"
PACKED = ("qweight", "qzeros", "scales", "g_idx")
PLAIN_DTYPES = ("BF16", "F16", "F32")
SCALE_DTYPES = ("BF16", "F32")
PIN = "compare the rules and the revisions in pins/models/ with the repositories' indexes"


class Module(NamedTuple):
    """What a repository holds of a module. parts: last part of the tensor's name -> tensor."""

    name: str
    parts: Mapping[str, TensorPlace]

    @property
    def file(self) -> str:
        return self.parts["qweight" if "qweight" in self.parts else WEIGHT].file

    @property
    def form(self) -> str:
        if "qweight" in self.parts:
            return "int4"
        return "fp8" if SCALE in self.parts else "plain"


class Rules:
    """The rules of the steps, asked for modules of the base. hits: how often each pattern fitted."""

    def __init__(self, rules: Sequence[FormatRule]) -> None:
        self.rules = rules
        owners = [(rule, pattern) for rule in self.rules for pattern in rule.modules]
        self._owners = [rule for rule, _ in owners]
        self.patterns = Patterns([pattern for _, pattern in owners])
        self.hits = [0] * len(owners)
        self._last: tuple[str, FormatRule | None] = ("", None)

    def wants(self, tensor: str) -> bool:
        """Whether a tensor of the base belongs to a module that a rule changes."""
        module, _, part = tensor.rpartition(".")
        if part not in (WEIGHT, SCALE, *PACKED):
            return False
        rule = self.rule(module)
        return rule is not None and rule.format != "keep"

    def rule(self, module: str) -> FormatRule | None:
        """The first rule that fits. The tensors of a module follow each other mostly, so the last answer is kept."""
        if module != self._last[0]:
            numbers = self.patterns.all(module)
            for number in numbers:
                self.hits[number] += 1
            self._last = (module, self._owners[numbers[0]] if numbers else None)
        return self._last[1]

    def check_hits(self, origin: str) -> None:
        for pattern, hits in zip(self.patterns.patterns, self.hits, strict=True):
            if not hits:
                fault = f"{pattern!r} fits no module with a weight in {origin}"
                raise CheckpointError(f"hybrid.rules or mtp.rules: {fault}", next_step=PIN)


def modules_of(found: Mapping[str, TensorPlace]) -> dict[str, Module]:
    """Modules by name, sorted, from tensors; a module has a `weight` or a `qweight`."""
    parts: dict[str, dict[str, TensorPlace]] = {}
    for name in sorted(found):
        module, _, part = name.rpartition(".")
        parts.setdefault(module, {})[part] = found[name]
    return {name: Module(name, held) for name, held in parts.items() if WEIGHT in held or "qweight" in held}


def taken_names(modules: Mapping[str, Module], rules: Rules, repository: str) -> set[str]:
    """The names of the tensors that rules take from a repository, if it has them."""
    names = set()
    for module in modules:
        rule = rules.rule(module)
        if rule is not None and rule.source == repository:
            names.add(f"{module}.{WEIGHT}")
            names.add(f"{module}.{SCALE}")
    return names


def apply_formats(draft: Draft, modules: Mapping[str, Module], rules: Rules) -> None:
    """Carry out the rules. Raises CheckpointError, before anything is changed, if one module does not fit."""
    rules.check_hits(draft.base.origin)
    extra_config = extra_config_of(draft)
    for rule in rules.rules:
        if rule.format == "fp8" and rule.source and rule.block:
            check_source_config(draft.donors[rule.source], rule.block)
    changes: list[tuple[Module, FormatRule, dict[str, TensorPlace]]] = []
    for module in modules.values():
        first = rules.rule(module.name)
        if first is not None and first.source:
            changes.append((module, first, check_module(draft.base, draft.donors[first.source], module, first)))
    check_fused({module.name: rule.format for module, rule, _ in changes}, draft)
    for module, rule, new in changes:
        replace(draft, module, new)
        extra_config[module.name] = fp8_entry(rule.block) if rule.block else dict(PLAIN_ENTRY)


def replace(draft: Draft, module: Module, new: Mapping[str, TensorPlace]) -> None:
    """Take out what the module holds and put in what the donor has, in the same file."""
    file = module.file
    listed = draft.base.listed.get(module.parts["qweight" if module.form == "int4" else WEIGHT].info.name) is not None
    for old in module.parts.values():
        draft.drop(old)
    for source in new.values():
        draft.add(file, source, listed=listed)


def check_module(
    base: ReadRepository, donor: ReadRepository, module: Module, rule: FormatRule
) -> dict[str, TensorPlace]:
    """The donor's tensors for a module, by part, checked against what they replace and against each other."""

    def wrong(part: str, where: ReadRepository, seen: object, wanted: object) -> CheckpointError:
        return unfit(where, f"{module.name}.{part}", seen, wanted)

    check_loadable(module, rule)
    if module.form == "fp8":
        raise wrong(SCALE, base, "a scale", "none: this module is FP8 already")
    shape = packed_shape(base, module) if module.form == "int4" else module.parts[WEIGHT].info.shape
    if module.form == "plain":
        dtype = module.parts[WEIGHT].info.dtype
        if dtype not in PLAIN_DTYPES or len(shape) != 2:
            wanted = f"a matrix of {' or '.join(PLAIN_DTYPES)} to replace"
            raise wrong(WEIGHT, base, f"{dtype} {list(shape)}", wanted)
    dtypes = ("F8_E4M3",) if rule.format == "fp8" else PLAIN_DTYPES
    weight = donor.found.get(f"{module.name}.{WEIGHT}")
    if weight is None:
        raise wrong(WEIGHT, donor, "no such tensor", f"{' or '.join(dtypes)} {list(shape)}")
    if weight.info.dtype not in dtypes:
        raise wrong(WEIGHT, donor, f"dtype {weight.info.dtype}", " or ".join(dtypes))
    if weight.info.shape != shape:
        raise wrong(WEIGHT, donor, f"shape {list(weight.info.shape)}", f"{list(shape)} as in the base")
    scale = donor.found.get(f"{module.name}.{SCALE}")
    if rule.block is None:
        if scale is not None:
            raise wrong(SCALE, donor, "a scale", "none beside a plain weight")
        return {WEIGHT: weight}
    if scale is None:
        raise wrong(SCALE, donor, "no such tensor", "the scales of the FP8 weight")
    check_scale(donor, weight.info, scale.info, rule.block)
    return {WEIGHT: weight, SCALE: scale}


def check_scale(donor: ReadRepository, weight: TensorInfo, scale: TensorInfo, block: Sequence[int]) -> None:
    """CheckpointError unless `weight` is an FP8 matrix and `scale` has one number for each `block` of it."""
    if weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
        raise unfit(donor, weight.name, f"{weight.dtype} {list(weight.shape)}", "an F8_E4M3 matrix beside its scales")
    if scale.dtype not in SCALE_DTYPES:
        raise unfit(donor, scale.name, f"dtype {scale.dtype}", " or ".join(SCALE_DTYPES))
    wanted = [-(-size // step) for size, step in zip(weight.shape, block, strict=True)]
    if list(scale.shape) != wanted:
        what = f"{wanted} for a weight of {list(weight.shape)} in blocks of {list(block)}"
        raise unfit(donor, scale.name, f"shape {list(scale.shape)}", what)


def unfit(where: ReadRepository, name: str, seen: object, wanted: object) -> CheckpointError:
    return CheckpointError(f"{where.origin}: {name}: saw {seen}, wanted {wanted}", next_step=PIN)


def check_loadable(module: Module, rule: FormatRule) -> None:
    """CheckpointError for what vLLM 0.32 stops at while it loads, and which a plan can tell hours earlier."""
    why = ""
    if rule.format == "fp8" and module.name.rpartition(".")[2] == "lm_head":
        why = "the LM head cannot be FP8"
    elif rule.format == "plain" and module.form == "int4" and ".experts." in module.name:
        why = "experts over INT4 cannot be plain"
    if why:
        raise CheckpointError(
            f"hybrid.rules or mtp.rules: {module.name}: saw format {rule.format}; {why}: vLLM 0.32 would not read it",
            next_step="let no such rule fit it, or `keep` it by an earlier one (docs/checkpoints.md, rules)",
        )


def packed_shape(base: ReadRepository, module: Module) -> tuple[int, ...]:
    """[out, in] of the matrix that INT4's tensors hold; they are checked against each other.

    auto_gptq: qweight I32 [in / (32 / bits), out]; auto_awq: qweight I32 [in, out / (32 / bits)]; scales [groups, out].
    """
    config = base.config.get("quantization_config") or {}
    entry = (config.get("extra_config") or {}).get(module.name) or {}
    bits = entry.get("bits", config.get("bits"))
    qweight = module.parts["qweight"].info
    scales = module.parts.get("scales")
    if not isinstance(bits, int) or bits not in (2, 4, 8):
        where = f"{base.origin}/{CONFIG}: quantization_config.bits"
        raise CheckpointError(f"{where}: saw {bits!r} for {module.name}, wanted 2, 4 or 8", next_step=PIN)
    if qweight.dtype != "I32" or len(qweight.shape) != 2:
        raise unfit(base, qweight.name, f"{qweight.dtype} {list(qweight.shape)}", "an I32 matrix")
    rows, columns = qweight.shape
    pack = 32 // bits
    awq = "awq" in str(config.get("packing_format", ""))
    shape = (columns * pack, rows) if awq else (columns, rows * pack)
    if scales is None or len(scales.info.shape) != 2 or scales.info.shape[1] != shape[0]:
        seen = "no such tensor" if scales is None else f"shape {list(scales.info.shape)}"
        wanted = f"[groups, {shape[0]}] beside a qweight of {list(qweight.shape)}"
        raise unfit(base, f"{module.name}.scales", seen, wanted)
    return shape
