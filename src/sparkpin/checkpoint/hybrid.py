"""The `hybrid` step: shared experts in FP8 inside an INT4 checkpoint.

`<module>.weight` (BF16) becomes `<module>.weight` (F8_E4M3) and `<module>.weight_scale_inv` of the FP8 repository, in
the same shard, and `quantization_config.extra_config` says so for the module. Value = weight * weight_scale_inv, one
scale for each block of the weight (DeepSeek-V3's block format, as published for Qwen's FP8 repositories).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkpin.checkpoint.draft import Change, Draft, matching, some
from sparkpin.checkpoint.repository import CONFIG, Repository, Source
from sparkpin.errors import CheckpointError
from sparkpin.schema import HybridStep

WEIGHT, SCALE = ".weight", ".weight_scale_inv"
PLAIN_DTYPES = ("BF16", "F16", "F32")
SCALE_DTYPES = ("BF16", "F32")
_PIN = "compare hybrid.modules and the revisions in pins/models/ with the repositories' indexes"


def extra_config_entry(block: tuple[int, int]) -> dict[str, Any]:
    """What the hybrid-int4-fp8 mod looks for in `quantization_config.extra_config`."""
    return {"bits": 8, "group_size": list(block), "sym": True, "data_type": "fp"}


def apply_hybrid(draft: Draft, step: HybridStep) -> None:
    """Replace in place. Raises CheckpointError, before anything is changed, if one module does not fit."""
    source = draft.repositories[step.source]
    block = (step.block[0], step.block[1])
    check_source_config(source, block)
    extra_config = extra_config_of(draft)
    modules = find_modules(draft, step)
    pairs = {module: check_module(draft, source, module, block) for module in modules}
    for module, (old, weight, scale) in pairs.items():
        draft.put(old.file, module + WEIGHT, weight)
        draft.put(old.file, module + SCALE, scale)
        note = f"{old.info.dtype} -> {weight.info.dtype}, from {step.source}"
        draft.changes += [
            Change("replaced", module + WEIGHT, old.info.nbytes, weight.info.nbytes, note),
            Change("added", module + SCALE, 0, scale.info.nbytes, f"{scale.info.dtype}, from {step.source}"),
        ]
        extra_config[module] = extra_config_entry(block)
    used = {module + suffix for module in modules for suffix in (WEIGHT, SCALE)}
    draft.changes += [
        Change("unused", name, tensor.info.nbytes, 0, f"{tensor.info.dtype} of {step.source}")
        for name, tensor in source.tensors.items()
        if tensor.info.dtype == "F8_E4M3" and name not in used
    ]


def find_modules(draft: Draft, step: HybridStep) -> list[str]:
    """The modules of the base that have a weight and fit a pattern, sorted."""
    names = [name for tensors in draft.shards.values() for name in tensors]
    modules = sorted(name.removesuffix(WEIGHT) for name in names if name.endswith(WEIGHT))
    found: set[str] = set()
    for pattern in step.modules:
        hits = matching(modules, pattern)
        if not hits:
            packed = sorted(name for name in names if name.endswith(".qweight"))
            quantised = matching([name.removesuffix(".qweight") for name in packed], pattern)
            why = f"; {some(quantised)} fit but hold INT4 (qweight)" if quantised else ""
            raise CheckpointError(
                f"hybrid.modules: {pattern!r} fits no module with a weight in {draft.base.folder}{why}", next_step=_PIN
            )
        found.update(hits)
    return sorted(found)


def check_module(
    draft: Draft, source: Repository, module: str, block: tuple[int, int]
) -> tuple[Source, Source, Source]:
    """The base's weight, and the weight and scale that take its place, checked against each other."""

    def wrong(tensor: str, where: Repository, seen: object, wanted: object) -> CheckpointError:
        return CheckpointError(f"{where.folder}: {tensor}: saw {seen}, wanted {wanted}", next_step=_PIN)

    old = next(tensors[module + WEIGHT] for tensors in draft.shards.values() if module + WEIGHT in tensors)
    shape = old.info.shape
    if old.info.dtype not in PLAIN_DTYPES or len(shape) != 2:
        seen = f"{old.info.dtype} {list(shape)}"
        raise wrong(module + WEIGHT, draft.base, seen, f"a matrix of {' or '.join(PLAIN_DTYPES)} to replace")
    if any(module + SCALE in tensors for tensors in draft.shards.values()):
        raise wrong(module + SCALE, draft.base, "a scale", "none: this module is FP8 already")
    if module + WEIGHT not in source.tensors:
        raise wrong(module + WEIGHT, source, "no such tensor", f"F8_E4M3 {list(shape)}")
    weight = source.tensors[module + WEIGHT]
    if weight.info.dtype != "F8_E4M3":
        raise wrong(module + WEIGHT, source, f"dtype {weight.info.dtype}", "F8_E4M3")
    if weight.info.shape != shape:
        raise wrong(module + WEIGHT, source, f"shape {list(weight.info.shape)}", f"{list(shape)} as in the base")
    if module + SCALE not in source.tensors:
        raise wrong(module + SCALE, source, "no such tensor", "the scales of the FP8 weight")
    scale = source.tensors[module + SCALE]
    if scale.info.dtype not in SCALE_DTYPES:
        raise wrong(module + SCALE, source, f"dtype {scale.info.dtype}", " or ".join(SCALE_DTYPES))
    wanted = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
    if scale.info.shape != wanted:
        what = f"{list(wanted)} for a weight of {list(shape)} in blocks of {list(block)}"
        raise wrong(module + SCALE, source, f"shape {list(scale.info.shape)}", what)
    return old, weight, scale


def check_source_config(source: Repository, block: tuple[int, int]) -> None:
    """The FP8 repository says the same block size as the pin."""
    config = source.config.get("quantization_config") or {}
    for key, wanted in (("quant_method", "fp8"), ("weight_block_size", list(block))):
        if config.get(key) != wanted:
            raise CheckpointError(
                f"{source.folder / CONFIG}: quantization_config.{key}: saw {config.get(key)!r}, wanted {wanted!r}",
                next_step="correct hybrid.block or hybrid.source in pins/models/",
            )


def extra_config_of(draft: Draft) -> dict[str, Any]:
    """The mapping of the draft's config to write entries into, made if absent."""
    config = draft.config.get("quantization_config")
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{draft.base.folder / CONFIG}: quantization_config: saw {config!r}, wanted AutoRound's settings",
            next_step="choose a quantised base repository in pins/models/",
        )
    extra: Mapping[str, Any] | None = config.get("extra_config")
    config["extra_config"] = dict(extra or {})
    made: dict[str, Any] = config["extra_config"]
    return made
