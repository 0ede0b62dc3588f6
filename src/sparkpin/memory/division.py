"""Whether each machine's share of a model is whole: heads, quantisation blocks and groups, rows of the vocabulary.

vLLM checks the same, after every machine has loaded its images and weights, and names neither machine nor key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from sparkpin.core.errors import WHOLE, ManifestError
from sparkpin.memory.geometry import Geometry, read_geometry, text_of
from sparkpin.pins.nodes import MOST_NODES, PIPELINE, TENSOR
from sparkpin.pins.schema import FormatRule
from sparkpin.pins.vllm_flags import flag_value

VOCABULARY_PADDING = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py
HYBRID_PIPELINE = "vLLM 0.33 answered with garbled text where it divided the layers of a model with linear attention"
"""1 of 10 answers was right on two H200s, with the V2 model runner; nobody measured VLLM_USE_V2_MODEL_RUNNER=0."""
BODIES = ("model.language_model.layers", "model.layers")


def division_faults(
    config: Mapping[str, Any], argv: Sequence[str], rules: Sequence[FormatRule], file: object
) -> Iterator[ManifestError]:
    """What keeps a model from being served by the machines of `argv`.

    config: of the base; rules: of the `hybrid` step, where a stage has it. Raises ManifestError for a config that
    `read_geometry` cannot read, and in the end for an architecture that may have more to divide.
    """
    geometry = read_geometry(config, "config.json")
    tensor, pipeline = (int(flag_value(argv, name) or 1) for name in (TENSOR, PIPELINE))
    if pipeline > 1 and any(part.kind == "state" for part in geometry.architecture.parts):
        step = f"leave {PIPELINE} out of {file}: tensor parallelism serves this model"
        yield ManifestError(file, "command", f"{PIPELINE} {pipeline}", f"1: {HYBRID_PIPELINE}", next_step=step)
    fitting = [str(count) for count in range(1, MOST_NODES + 1) if not list(uneven(config, geometry, rules, count))]
    for got, expected in uneven(config, geometry, rules, tensor):
        step = f"in {file} a number of nodes that its model divides by: {', '.join(fitting)}"
        yield ManifestError(file, "nodes", got, expected, next_step=step)
    if geometry.architecture.unknown:
        raise ManifestError("config.json", WHOLE, geometry.architecture.unknown, "an architecture of docs/memory.md")


def uneven(
    config: Mapping[str, Any], geometry: Geometry, rules: Sequence[FormatRule], ranks: int
) -> Iterator[tuple[str, str]]:
    """What is there and what is expected, for each part of the model that has no whole share for each of `ranks`."""
    if part := geometry.undivided(ranks):
        yield f"{part} over {ranks}", "a whole share for each"
    rows = geometry.vocabulary + -geometry.vocabulary % VOCABULARY_PADDING
    if rows % ranks:
        yield f"vocab_size {geometry.vocabulary}, padded {rows}, over {ranks}", "as many rows of the LM head for each"
    text = text_of(config)
    # Of each module the columns of its weight, which the ranks divide among themselves, or the rows of what feeds it.
    widths = {
        "mlp.experts.0.down_proj" if text.get("moe_intermediate_size") else "mlp.down_proj": geometry.expert_width,
        "mlp.shared_expert.down_proj": text.get("shared_expert_intermediate_size") or 0,
        "self_attn.o_proj": geometry.heads * geometry.head_dim,
        "self_attn.k_proj": max(ranks, geometry.kv_heads) * geometry.head_dim,
        "linear_attn.out_proj": geometry.value_heads * geometry.value_dim,
        "linear_attn.in_proj_qkv": geometry.key_heads * geometry.key_dim,
    }
    for module, width in widths.items():
        for unit, what in units_of(config, module, rules) if ranks > 1 else ():
            if width % (ranks * unit):
                yield f"{module}: {width:,} over {ranks}, {width / ranks:,g} for each", f"whole {what} of {unit}"


def units_of(config: Mapping[str, Any], module: str, rules: Sequence[FormatRule]) -> set[tuple[int, str]]:
    """What may not be cut in a module's weight where the ranks divide it, over all layers that have the module."""
    quantised, found = config.get("quantization_config") or {}, set[tuple[int, str]]()
    block, group = quantised.get("weight_block_size"), quantised.get("group_size") or 0
    if module.endswith(("k_proj", "in_proj_qkv")):  # divided by rows, each of which has groups of its own
        group = 0
    base = {(max(block), "FP8 blocks")} if block else {(group, "INT4 groups")} if group > 0 else set()
    plain = {name for name, how in (quantised.get("extra_config") or {}).items() if how.get("bits") == 16}
    plain |= {*(quantised.get("modules_to_not_convert") or ())}
    for layer in range(text_of(config)["num_hidden_layers"]):
        names = {f"{body}.{layer}.{module}" for body in BODIES}
        rule = next((one for one in rules if any(fnmatch(name, p) for name in names for p in one.modules)), None)
        if rule and rule.format != "keep":
            found |= {(max(rule.block), "FP8 blocks")} if rule.block else set()
        elif not plain & names:
            found |= base
    return found
