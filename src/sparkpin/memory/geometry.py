"""The sizes of a model that decide its caches, read from config.json alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkpin.core.errors import ManifestError

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
KNOWN = ("full_attention", "linear_attention", "sliding_attention")
NEXT = "choose a model whose config.json describes a Qwen3.5 or a plain attention model"


@dataclass(frozen=True, slots=True)
class Geometry:
    """attention, linear: layers of each kind; draft: MTP layers, each with full attention. sliding: of a drafter's
    attention layers those that see the last `window` tokens alone.

    key_heads to value_dim and conv_kernel are those of the linear attention (Gated DeltaNet), 0 where there is none.
    ssm_dtype: the type that the config demands of the recurrent state, None where it demands none.
    """

    attention: int
    linear: int
    draft: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    conv_kernel: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    experts_per_token: int
    expert_width: int
    max_positions: int
    dtype: str
    ssm_dtype: str | None
    vision: bool
    sliding: int = 0
    window: int = 0

    @property
    def layers(self) -> int:
        return self.attention + self.linear

    @property
    def conv_width(self) -> int:
        """Channels of the short convolution: queries and keys, then values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def undivided(self, ranks: int) -> str:
        """The first size that `ranks` does not divide, though vLLM must divide it; "" where all are whole."""
        sizes = {
            "attention heads": self.heads,
            "linear key heads": self.key_heads,
            "linear value heads": self.value_heads,
            "expert width": self.expert_width,
        }
        if self.kv_heads % ranks and ranks % self.kv_heads:
            return f"KV heads ({self.kv_heads})"
        return next((f"{name} ({size})" for name, size in sizes.items() if size % ranks), "")

    def shard(self, ranks: int) -> Geometry:
        """What one of `ranks` tensor-parallel GPUs holds of each layer; KV heads are copied where there are fewer."""
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=max(1, self.kv_heads // ranks),
            key_heads=self.key_heads // ranks,
            value_heads=self.value_heads // ranks,
            expert_width=self.expert_width // ranks,
        )


def read_geometry(config: Mapping[str, Any], origin: str, *, drafter: bool = False) -> Geometry:
    """The text model's sizes; a config of a model with vision has them in `text_config`. drafter: of a second model.

    Raises ManifestError for a key that is missing or no positive number.
    """
    text = text_of(config)

    def number(key: str, default: int | None = None) -> int:
        value = text.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < (1 if default is None else 0):
            seen = text.get(key, "(missing)")
            raise ManifestError(origin, key, seen, "a positive whole number", next_step=NEXT)
        return value

    layers = number("num_hidden_layers")
    kinds = layer_kinds(text, layers, origin, KNOWN if drafter else KNOWN[:2])
    linear, sliding = kinds.count("linear_attention"), kinds.count("sliding_attention")
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    default = None if linear else 0
    return Geometry(
        attention=layers - linear,
        linear=linear,
        draft=number("mtp_num_hidden_layers", 0),
        hidden=hidden,
        vocabulary=number("vocab_size"),
        heads=heads,
        kv_heads=number("num_key_value_heads"),
        head_dim=number("head_dim", hidden // heads),
        conv_kernel=number("linear_conv_kernel_dim", default),
        key_heads=number("linear_num_key_heads", default),
        key_dim=number("linear_key_head_dim", default),
        value_heads=number("linear_num_value_heads", default),
        value_dim=number("linear_value_head_dim", default),
        experts_per_token=number("num_experts_per_tok", 0),
        expert_width=number("moe_intermediate_size", 0) or number("intermediate_size", 0),
        max_positions=positions(number("max_position_embeddings"), text),
        # Older configs call it torch_dtype.
        dtype=dtype_of(((part, key) for part in (config, text) for key in ("dtype", "torch_dtype")), origin)
        or "bfloat16",
        ssm_dtype=dtype_of([(text, "mamba_ssm_dtype")], origin),
        sliding=sliding,
        window=number("sliding_window") if sliding else 0,
        vision=any(str(name).endswith("ForConditionalGeneration") for name in config.get("architectures") or ()),
    )


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the text model."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def positions(stored: int, text: Mapping[str, Any]) -> int:
    """vllm/config/model.py, _get_and_verify_max_len: `linear` and `dynamic` RoPE count times their factor."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    factor = rope.get("factor") if rope.get("rope_type", rope.get("type")) in ("linear", "dynamic") else 1
    return int(stored * factor) if isinstance(factor, int | float) else stored


def layer_kinds(text: Mapping[str, Any], layers: int, origin: str, known: Sequence[str]) -> list[str]:
    """One word a layer: from `layer_types`, else every n-th is full attention, else all are."""
    kinds = text.get("layer_types")
    if kinds is None:
        every = text.get("full_attention_interval") or 1
        return ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        seen = f"{len(kinds)} entries" if isinstance(kinds, list) else kinds
        raise ManifestError(origin, "layer_types", seen, f"{layers} entries, one a layer", next_step=NEXT)
    unknown = next((str(kind) for kind in kinds if kind not in known), None)
    if unknown or set(kinds) == {"linear_attention"}:
        expected = f"{' and '.join(known)}, not linear_attention alone"
        raise ManifestError(origin, "layer_types", unknown or kinds[:3], expected, next_step=NEXT)
    return kinds


def dtype_of(places: Iterable[tuple[Mapping[str, Any], str]], origin: str) -> str | None:
    """The first type that is given, of these mappings and keys."""
    for part, key in places:
        if (value := part.get(key)) is not None:
            if value not in DTYPE_BYTES:
                raise ManifestError(origin, key, value, f"one of {', '.join(DTYPE_BYTES)}", next_step=NEXT)
            return str(value)
    return None
