"""The `hybrid` step: which modules of an INT4 checkpoint hold FP8 or plain weights of another repository.

A module (`model.layers.0.mlp.gate_proj`) is in one of three forms. int4: `qweight`, `qzeros`, `scales` (and `g_idx`) of
AutoRound; fp8: `weight` (F8_E4M3) and `weight_scale_inv`, where value = weight * weight_scale_inv, one scale for each
block (DeepSeek-V3's format, as published for Qwen's FP8 repositories); plain: `weight` in BF16, F16 or F32. What a rule
gives goes into the shard of what it takes away, and `quantization_config.extra_config` names the module's new format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import translate
from typing import Any, NamedTuple

from sparkpin.checkpoint.draft import Draft
from sparkpin.checkpoint.repository import CONFIG, ReadRepository, TensorPlace
from sparkpin.checkpoint.safetensors import TensorInfo
from sparkpin.core.errors import CheckpointError
from sparkpin.pins.schema import FormatRule

WEIGHT, SCALE = "weight", "weight_scale_inv"
PACKED = ("qweight", "qzeros", "scales", "g_idx")
PLAIN_DTYPES = ("BF16", "F16", "F32")
SCALE_DTYPES = ("BF16", "F32")
PLAIN_ENTRY: Mapping[str, Any] = {"bits": 16, "data_type": "float"}
"""What vLLM looks for in `extra_config` for a module in 16 bits among quantised ones."""

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Modules of one parent that vLLM 0.32 loads as one linear layer: qkv, gate_up, in_proj_qkvz, in_proj_ba."""

MISSING = "no such tensor"
RULES = "hybrid.rules or mtp.rules"
PIN = "compare the rules and the revisions in pins/models/ with the repositories' indexes"
REVISION = "choose another repository or revision in pins/models/"


class Patterns:
    """fnmatch's, compiled once for more than 100,000 names, of which most fit none."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.compiled = [re.compile(translate(pattern)) for pattern in patterns]
        self.any = re.compile("|".join(map(translate, patterns)) or "(?!)")

    def all(self, name: str) -> list[int]:
        """The numbers of all patterns that the name fits."""
        if not self.any.match(name):
            return []
        return [number for number, compiled in enumerate(self.compiled) if compiled.match(name)]


class Module(NamedTuple):
    """What a repository holds of a module. parts: last part of the tensor's name -> tensor."""

    name: str
    parts: Mapping[str, TensorPlace]

    @property
    def main(self) -> TensorPlace:
        return self.parts.get("qweight") or self.parts[WEIGHT]

    @property
    def form(self) -> str:
        return "int4" if "qweight" in self.parts else "fp8" if SCALE in self.parts else "plain"


class Rules:
    """The rules of the steps, matched against modules of the base. hits: the numbers of patterns that fitted one."""

    def __init__(self, rules: Sequence[FormatRule]) -> None:
        self.rules = rules
        self.owners = [(pattern, rule) for rule in rules for pattern in rule.modules]
        self.patterns = Patterns([pattern for pattern, _ in self.owners])
        self.hits = set[int]()
        self.last: tuple[str, FormatRule | None] = ("", None)

    def wants(self, tensor: str) -> bool:
        """Whether a tensor of the base belongs to a module that a rule changes."""
        module, _, part = tensor.rpartition(".")
        if part not in (WEIGHT, SCALE, *PACKED):
            return False
        rule = self.rule(module)
        return rule is not None and rule.format != "keep"

    def rule(self, module: str) -> FormatRule | None:
        """The first rule that fits. The tensors of a module mostly follow each other, so the last answer is cached."""
        if module != self.last[0]:
            numbers = self.patterns.all(module)
            self.hits.update(numbers)
            self.last = (module, self.owners[numbers[0]][1] if numbers else None)
        return self.last[1]

    def check_hits(self, origin: str) -> None:
        for number, (pattern, _) in enumerate(self.owners):
            if number not in self.hits:
                raise CheckpointError(f"{RULES}: {pattern!r} fits no module with a weight in {origin}", next_step=PIN)


def modules_of(found: Mapping[str, TensorPlace]) -> dict[str, Module]:
    """Modules by name, sorted, from tensors; a module has a `weight` or a `qweight`."""
    parts: dict[str, dict[str, TensorPlace]] = {}
    for name in sorted(found):
        module, _, part = name.rpartition(".")
        parts.setdefault(module, {})[part] = found[name]
    return {name: Module(name, there) for name, there in parts.items() if WEIGHT in there or "qweight" in there}


def taken_names(modules: Mapping[str, Module], rules: Rules, repository: str) -> set[str]:
    """The names of the tensors that rules take from a repository, if it has them."""
    donated = [module for module in modules if (rule := rules.rule(module)) and rule.source == repository]
    return {f"{module}.{part}" for module in donated for part in (WEIGHT, SCALE)}


def apply_formats(draft: Draft, modules: Mapping[str, Module], rules: Rules) -> None:
    """Carry out the rules. Raises CheckpointError, before anything is changed, if one module does not fit."""
    rules.check_hits(draft.base.origin)
    extra_config = extra_config_of(draft)
    for rule in rules.rules:
        if rule.source and rule.block and (block := block_of(draft.donors[rule.source])) != list(rule.block):
            cause = f"{RULES}: block: got {list(rule.block)}, expected {block} as in {draft.donors[rule.source].origin}"
            raise CheckpointError(cause, next_step="correct `block` or `source` of the rules in pins/models/")
    changed = {name: first for name in modules if (first := rules.rule(name)) and first.source}
    new = {
        name: check_module(draft.base, draft.donors[rule.source or ""], modules[name], rule)
        for name, rule in changed.items()
    }
    check_fused({name: rule.format for name, rule in changed.items()}, draft)
    for name, rule in changed.items():
        main = modules[name].main
        for old in modules[name].parts.values():
            draft.drop(old)
        for source in new[name]:
            draft.add(main.file, source, listed=main.info.name in draft.base.listed)
        extra_config[name] = fp8_entry(rule.block) if rule.block else dict(PLAIN_ENTRY)


def check_module(base: ReadRepository, donor: ReadRepository, module: Module, rule: FormatRule) -> list[TensorPlace]:
    """The donor's tensors for a module, checked against what they replace and against each other."""
    name, scales = f"{module.name}.{WEIGHT}", f"{module.name}.{SCALE}"
    check_loadable(module, rule)
    if module.form == "fp8":
        raise unfit(base, scales, "a scale", "none: this module is FP8 already")
    old = module.main.info
    shape = packed_shape(base, module) if module.form == "int4" else old.shape
    if module.form == "plain" and (old.dtype not in PLAIN_DTYPES or len(shape) != 2):
        raise unfit(base, name, shown(old), f"a matrix of {' or '.join(PLAIN_DTYPES)} to replace")
    dtypes = ("F8_E4M3",) if rule.format == "fp8" else PLAIN_DTYPES
    weight, scale = donor.found.get(name), donor.found.get(scales)
    if weight is None or weight.info.dtype not in dtypes or weight.info.shape != shape:
        got = shown(weight.info) if weight else MISSING
        raise unfit(donor, name, got, f"{' or '.join(dtypes)} {list(shape)} as in the base")
    if rule.block is None:
        if scale:
            raise unfit(donor, scales, "a scale", "none with a plain weight")
        return [weight]
    if scale is None:
        raise unfit(donor, scales, MISSING, "the scales of the FP8 weight")
    check_scale(donor, weight.info, scale.info, rule.block)
    return [weight, scale]


def check_scale(donor: ReadRepository, weight: TensorInfo, scale: TensorInfo, block: Sequence[int]) -> None:
    """CheckpointError unless `weight` is an FP8 matrix and `scale` has one number for each `block` of it."""
    if weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
        raise unfit(donor, weight.name, shown(weight), "an F8_E4M3 matrix with its scales")
    blocks = [-(-size // step) for size, step in zip(weight.shape, block, strict=True)]
    if scale.dtype not in SCALE_DTYPES or list(scale.shape) != blocks:
        expected = f"{' or '.join(SCALE_DTYPES)} {blocks} for a weight of {list(weight.shape)}, blocks of {list(block)}"
        raise unfit(donor, scale.name, shown(scale), expected)


def shown(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def unfit(where: ReadRepository, name: str, got: object, expected: object) -> CheckpointError:
    return CheckpointError(f"{where.origin}: {name}: got {got}, expected {expected}", next_step=PIN)


def check_loadable(module: Module, rule: FormatRule) -> None:
    """CheckpointError for what vLLM 0.32 stops at while it loads, and which a plan can find hours earlier."""
    is_head = rule.format == "fp8" and module.name.rpartition(".")[2] == "lm_head"
    if is_head or (rule.format == "plain" and module.form == "int4" and ".experts." in module.name):
        cause = f"{RULES}: {module.name}: got format {rule.format}, which vLLM 0.32 would not read"
        step = "let no such rule fit it, or `keep` it by an earlier one (docs/checkpoints.md, rules)"
        raise CheckpointError(cause, next_step=step)


def packed_shape(base: ReadRepository, module: Module) -> tuple[int, ...]:
    """[out, in] of the matrix that INT4's tensors hold; they are checked against each other.

    auto_gptq: qweight I32 [in / (32 / bits), out]; auto_awq: qweight I32 [in, out / (32 / bits)]; scales [groups, out].
    """
    config = base.config.get("quantization_config") or {}
    entry = (config.get("extra_config") or {}).get(module.name) or {}
    bits = entry.get("bits", config.get("bits"))
    qweight, scales = module.parts["qweight"].info, module.parts.get("scales")
    if type(bits) is not int or bits not in (2, 4, 8):  # 4.0 would make floats of the shape
        raise unfit(base, f"{CONFIG}, quantization_config.bits for {module.name}", repr(bits), "2, 4 or 8")
    if qweight.dtype != "I32" or len(qweight.shape) != 2:
        raise unfit(base, qweight.name, shown(qweight), "an I32 matrix")
    (rows, columns), pack = qweight.shape, 32 // bits
    awq = "awq" in str(config.get("packing_format", ""))
    shape = (columns * pack, rows) if awq else (columns, rows * pack)
    if scales is None or scales.info.shape[1:] != shape[:1]:
        expected = f"[groups, {shape[0]}] with a qweight of {list(qweight.shape)}"
        raise unfit(base, f"{module.name}.scales", shown(scales.info) if scales else MISSING, expected)
    return shape


def layer_of(module: str) -> str:
    """The layer of vLLM that loads a module with others; "" for one that it loads alone. All experts of a layer are
    one, whose three matrices are in one format, too."""
    experts, inside, _ = module.partition(".experts.")
    if inside:
        return f"{experts}.experts"
    parent, _, last = module.rpartition(".")
    return next((f"{parent}.{group[0]}" for group in FUSED if last in group), "")


def check_fused(changed: dict[str, str], draft: Draft) -> None:
    """changed: module -> its new format. Raises CheckpointError for a layer of vLLM whose parts would differ."""
    layers = {layer: module for module in reversed(changed) if (layer := layer_of(module))}  # with one module of each
    for module in sorted({name.rpartition(".")[0] for name in (*draft.base.listed, *draft.base.unlisted)}):
        if first := layers.get(layer_of(module)):
            form, other = changed[first], changed.get(module) or form_in_base(module, draft)
            if other not in (None, form):
                cause = f"vLLM loads {first} and {module} as one layer, but they would hold {form} and {other}"
                step = "let one of the rules in pins/models/ fit all parts of the layer"
                raise CheckpointError(f"{RULES}: {cause}", next_step=step)


def form_in_base(module: str, draft: Draft) -> str | None:
    """int4, fp8 or plain; None if the base has no such module."""
    forms = (("qweight", "int4"), (SCALE, "fp8"), (WEIGHT, "plain"))
    return next((form for part, form in forms if draft.base.file_of(f"{module}.{part}")), None)


def fp8_entry(block: Sequence[int]) -> dict[str, Any]:
    """What the hybrid-int4-fp8 mod looks for in `extra_config`."""
    return {"bits": 8, "group_size": list(block), "sym": True, "data_type": "fp"}


def quantization_config(source: ReadRepository, config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The mapping of a config.json; CheckpointError where there is none. what: whose settings are expected."""
    found = config.get("quantization_config") if CONFIG in source.listing.texts else f"no {CONFIG}"
    if not isinstance(found, dict):
        cause = f"quantization_config: got {found!r}, expected {what} settings"
        raise source.listing.error(f"/{CONFIG}", cause, REVISION)
    return found


def block_of(source: ReadRepository) -> list[int]:
    """[rows, columns] of a block of an FP8 repository. Raises CheckpointError if its config has none."""
    config = quantization_config(source, source.config, "FP8")
    block: Any = config.get("weight_block_size")
    is_block = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if not is_block or config.get("quant_method") != "fp8":
        cause = f"quantization_config: got {config}, expected quant_method fp8 and weight_block_size [rows, columns]"
        raise source.listing.error(f"/{CONFIG}", cause, REVISION)
    return list(block)


def extra_config_of(draft: Draft) -> dict[str, Any]:
    """The mapping of the draft's config to write entries into, created if absent.

    Raises CheckpointError for a config without AutoRound's settings, and for entries of another form.
    """
    config = quantization_config(draft.base, draft.config, "AutoRound's")
    extra = config.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(entry, dict) for entry in extra.values()):
        cause = f"quantization_config.extra_config: got {extra!r:.200}, expected modules with settings"
        raise draft.base.listing.error(f"/{CONFIG}", cause, REVISION)
    entries = config["extra_config"] = dict(extra)
    return entries
