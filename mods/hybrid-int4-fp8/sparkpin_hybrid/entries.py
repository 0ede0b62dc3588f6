"""Reading FP8 entries out of an AutoRound ``extra_config``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BLOCK = (128, 128)
"""Rows and columns of E4M3 weights that share a float32 scale; activations are quantised as they come."""
EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")


def shard_names(prefix: str, packed_modules: Mapping[str, Sequence[str]]) -> list[str]:
    """Names that `prefix` has in the checkpoint.

    ``...mlp.shared_expert.gate_up_proj`` -> its ``gate_proj`` and ``up_proj``; a layer that is not fused -> itself.
    """
    parent, dot, last = prefix.rpartition(".")
    return [parent + dot + part for part in packed_modules.get(last, (last,))]


def is_fp8(
    prefix: str, extra_config: Mapping[str, Mapping[str, Any]] | None, packed_modules: Mapping[str, Sequence[str]]
) -> bool:
    """Whether `extra_config` asks for FP8 in the layer `prefix`.

    Args:
        prefix: vLLM's name of the layer, fused or not.
        extra_config: AutoRound's per-layer settings by checkpoint name (with or without a leading ``model.``).
        packed_modules: vLLM's ``packed_modules_mapping``, fused name -> its parts.

    Raises:
        ValueError: the parts of a fused layer differ, or an FP8 entry is not E4M3 in symmetric blocks of 128 x 128.
    """
    if not extra_config or not prefix:
        return False
    names = shard_names(prefix, packed_modules)
    asked = {_asks_fp8(name, extra_config) for name in names}
    if len(asked) > 1:
        seen = ", ".join(f"{name}: {_say(name, extra_config)}" for name in names)
        raise ValueError(
            f"{prefix} is one fused layer in vLLM, but its parts differ in quantization_config.extra_config: "
            f"{seen}. Wanted the same FP8 entry for each part, or for none."
        )
    return asked == {True}


def are_fp8_experts(prefix: str, extra_config: Mapping[str, Mapping[str, Any]] | None) -> bool:
    """Whether `extra_config` asks for FP8 in the routed experts under `prefix`, which are one layer in vLLM.

    Raises:
        ValueError: some matrix of some expert has no FP8 entry, or one of another form.
    """
    if not extra_config or not prefix:
        return False
    below = (f"{prefix}.", f"model.{prefix}.")
    found = {name.split(f"{prefix}.", 1)[1] for name in extra_config if name.startswith(below)}
    fp8 = {name for name in found if _asks_fp8(f"{prefix}.{name}", extra_config)}
    if not fp8:
        return False
    experts = {name.partition(".")[0] for name in fp8}
    numbers = range(max((int(expert) for expert in experts if expert.isdigit()), default=-1) + 1)
    wanted = [f"{expert}.{matrix}" for expert in numbers for matrix in EXPERT_MATRICES]
    if fp8 != set(wanted):
        odd = min(fp8 ^ set(wanted))
        raise ValueError(
            f"{prefix} is one layer of experts in vLLM, and {len(fp8)} of its modules have FP8 entries in "
            f"quantization_config.extra_config, but {prefix}.{odd} is {_say(f'{prefix}.{odd}', extra_config)}. "
            f"Wanted {', '.join(EXPERT_MATRICES)} of every expert, or none."
        )
    return True


def refuse_other_layers(kind: str, prefix: str, extra_config: Mapping[str, Mapping[str, Any]] | None) -> None:
    """For a layer that is neither linear nor of experts (the LM head): no FP8 entry may name it or a part of it.

    Raises:
        ValueError: one does. Left to vLLM, the layer would be made for other weights, and loading would fail at the
            first tensor that has no place.
    """
    if not extra_config or not prefix:
        return
    # A multimodal model's map renames what lies below ``lm_head.``, but not an entry that is ``lm_head`` itself.
    names = (prefix, f"model.{prefix}", prefix.removeprefix("language_model."))
    below = tuple(f"{name}." for name in names)
    for name in extra_config:
        if (name in names or name.startswith(below)) and _asks_fp8(name, extra_config):
            raise ValueError(
                f"quantization_config.extra_config[{name!r}] asks for FP8 in {prefix}, a {kind}; "
                "expected linear layers and experts only"
            )


def _lookup(name: str, extra_config: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    entry = extra_config.get(name)
    return entry if entry is not None else extra_config.get(f"model.{name}")


def _asks_fp8(name: str, extra_config: Mapping[str, Mapping[str, Any]]) -> bool:
    entry = _lookup(name, extra_config)
    if entry is None or entry.get("data_type") not in ("fp", "fp8") or entry.get("bits") != 8:
        return False
    group_size = entry.get("group_size")
    block = tuple(group_size) if isinstance(group_size, list | tuple) else group_size
    if block != BLOCK or entry.get("sym", True) is not True:
        raise ValueError(
            f"quantization_config.extra_config[{name!r}] is {dict(entry)}: "
            f"expected group_size {list(BLOCK)} and sym true for bits 8, data_type fp"
        )
    return True


def _say(name: str, extra_config: Mapping[str, Mapping[str, Any]]) -> str:
    entry = _lookup(name, extra_config)
    return "no entry" if entry is None else str(dict(entry))
