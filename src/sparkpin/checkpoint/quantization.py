"""`quantization_config` of a config.json: what a repository says of its weights, a checkpoint to vLLM and the mod."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparkpin.checkpoint.draft import Draft
from sparkpin.checkpoint.repository import CONFIG, ReadRepository
from sparkpin.core.errors import CheckpointError

PLAIN_ENTRY: Mapping[str, Any] = {"bits": 16, "data_type": "float"}
"""What vLLM looks for in `extra_config` for a module in 16 bits among quantised ones."""


def fp8_entry(block: Sequence[int]) -> dict[str, Any]:
    """What the hybrid-int4-fp8 mod looks for in `extra_config`."""
    return {"bits": 8, "group_size": list(block), "sym": True, "data_type": "fp"}


def fp8_settings(source: ReadRepository) -> Mapping[str, Any]:
    """What an FP8 repository says of itself; nothing if it says nothing. CheckpointError if that is no mapping."""
    require_config(source, "a quantization_config in FP8")
    config = source.config.get("quantization_config")
    if config is not None and not isinstance(config, dict):
        raise CheckpointError(
            f"{source.origin}/{CONFIG}: quantization_config: saw {config!r}, wanted a mapping",
            next_step=source.listing.mend or "choose a repository or revision in FP8, in pins/models/",
        )
    return config or {}


def require_config(source: ReadRepository, what: str) -> None:
    if CONFIG not in source.listing.texts:
        raise CheckpointError(
            f"{source.origin}: no {CONFIG}: saw no such file, wanted one with {what}",
            next_step=source.listing.mend or "choose a repository or revision that has it, in pins/models/",
        )


def check_source_config(source: ReadRepository, block: Sequence[int]) -> None:
    """The FP8 repository says the same block size as the pin."""
    config = fp8_settings(source)
    for key, wanted in (("quant_method", "fp8"), ("weight_block_size", list(block))):
        if config.get(key) != wanted:
            raise CheckpointError(
                f"{source.origin}/{CONFIG}: quantization_config.{key}: saw {config.get(key)!r}, wanted {wanted!r}",
                next_step="correct `block` or `source` of the rules in pins/models/",
            )


def block_of(source: ReadRepository) -> list[int]:
    """[rows, columns] of a block of an FP8 repository. Raises CheckpointError if it does not say that."""
    block = fp8_settings(source).get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise CheckpointError(
            f"{source.origin}/{CONFIG}: quantization_config.weight_block_size: saw {block!r}, wanted [rows, columns], "
            "the block of its FP8 tensors",
            next_step=source.listing.mend or "choose a repository or revision that says it, in pins/models/",
        )
    return block


def extra_config_of(draft: Draft) -> dict[str, Any]:
    """The mapping of the draft's config to write entries into, made if absent.

    Raises CheckpointError for a config without AutoRound's settings, and for entries of another form.
    """
    base, config = draft.base, draft.config.get("quantization_config")
    require_config(base, "AutoRound's quantization_config")
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{base.origin}/{CONFIG}: quantization_config: saw {config!r}, wanted AutoRound's settings",
            next_step="choose a quantised base repository in pins/models/",
        )
    extra = config.get("extra_config") or {}
    odd = [extra] if not isinstance(extra, dict) else [entry for entry in extra.values() if not isinstance(entry, dict)]
    if odd:
        raise CheckpointError(
            f"{base.origin}/{CONFIG}: quantization_config.extra_config: saw {odd[0]!r}, wanted modules with settings",
            next_step=base.listing.mend or "choose another repository or revision in pins/models/",
        )
    made: dict[str, Any] = dict(extra)
    config["extra_config"] = made
    return made
