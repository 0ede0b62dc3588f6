"""The `mtp` step: list the tensors of the multi-token prediction layer in the index.

A loader reads only the files that the index names, so a copy whose index leaves the MTP file out serves without
drafts and says nothing. Some published copies list it and some do not; both end in the same index here.
"""

from __future__ import annotations

from sparkpin.checkpoint.draft import Change, Draft, matching, some
from sparkpin.checkpoint.repository import CONFIG
from sparkpin.errors import CheckpointError
from sparkpin.schema import MtpStep

PREFIX = "mtp."
OUTER = ("mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
LAYERS = "mtp_num_hidden_layers"
_PIN = "choose a base repository with MTP tensors in pins/models/, or a stage before mtp"


def apply_mtp(draft: Draft, step: MtpStep) -> None:
    """List what is not listed yet. Raises CheckpointError if config or tensors of the MTP layer are missing."""
    layers = layer_count(draft)
    held = {name: file for file, tensors in draft.shards.items() for name in tensors}
    names = [name for name, file in held.items() if file == step.file or name in draft.weight_map]
    found: set[str] = set()
    for pattern in step.tensors:
        hits = matching(names, pattern)
        if not hits:
            where = f"{step.file} or the index" if step.file in draft.shards else f"the index, and no {step.file}"
            raise CheckpointError(
                f"{draft.base.folder}: mtp.tensors: {pattern!r} fits no tensor of {where}", next_step=_PIN
            )
        found.update(hits)
    missing = missing_tensors(sorted(found), sorted(held), layers)
    if missing:
        raise CheckpointError(
            f"{draft.base.folder}: the MTP layer lacks {some(missing)}; saw {len(found)} of its tensors", next_step=_PIN
        )
    for name in sorted(found):
        if draft.weight_map.get(name) != held[name]:
            draft.weight_map[name] = held[name]
            tensor = draft.shards[held[name]][name]
            draft.changes.append(
                Change("listed", name, tensor.info.nbytes, tensor.info.nbytes, f"{tensor.info.dtype}, in {held[name]}")
            )


def layer_count(draft: Draft) -> int:
    """`mtp_num_hidden_layers` of the config (of its text_config for a multimodal model)."""
    text = draft.config.get("text_config")
    configs = [draft.config, text if isinstance(text, dict) else {}]
    count = next((config[LAYERS] for config in configs if LAYERS in config), "(missing)")
    if not isinstance(count, int) or count < 1:
        raise CheckpointError(
            f"{draft.base.folder / CONFIG}: {LAYERS}: saw {count!r}, wanted 1 or more", next_step=_PIN
        )
    return count


def missing_tensors(found: list[str], names: list[str], layers: int) -> list[str]:
    """What an MTP layer needs and `found` lacks: its four outer tensors, and each module of a full-attention layer.

    Compared by module, since the base may hold `q_proj.qweight` where MTP has `q_proj.weight`. One layer of the body
    is the model for the comparison; experts are left out of it when either side stores them fused.
    """
    missing = [name for name in OUTER if name not in found]
    query = ".self_attn.q_proj."
    body = next((name.partition(query)[0] + "." for name in names if query in name and not name.startswith(PREFIX)), "")
    wanted = modules_under(names, body) if body else set()
    for layer in range(layers):
        prefix = f"{PREFIX}layers.{layer}."
        seen = modules_under(found, prefix)
        if fused_experts(seen) or fused_experts(wanted):
            wanted = {module for module in wanted if not module.startswith("mlp.experts")}
        missing += [f"{prefix}{module}.*" for module in sorted(wanted - seen)]
        if not seen and not wanted:
            missing.append(f"{prefix}*")
    return missing


def modules_under(names: list[str], prefix: str) -> set[str]:
    return {name.removeprefix(prefix).rpartition(".")[0] for name in names if name.startswith(prefix)}


def fused_experts(modules: set[str]) -> bool:
    """Whether `mlp.experts.gate_up_proj` and its like hold all experts in one tensor."""
    return "mlp.experts" in modules or any(
        module.startswith("mlp.experts.") and not module.split(".")[2].isdigit() for module in modules
    )
