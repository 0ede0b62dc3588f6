"""The sizes of a model that decide its caches, read from config.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkpin.core.errors import ManifestError

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
KNOWN = ("full_attention", "linear_attention", "sliding_attention")
DIVIDED = {
    "heads": "attention heads",
    "key_heads": "linear key heads",
    "value_heads": "linear value heads",
    "expert_width": "expert width",
}
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
        if self.kv_heads % ranks and ranks % self.kv_heads:
            return f"KV heads ({self.kv_heads})"
        sizes = ((what, getattr(self, name)) for name, what in DIVIDED.items())
        return next((f"{what} ({size})" for what, size in sizes if size % ranks), "")

    def shard(self, ranks: int) -> Geometry:
        """What one of `ranks` tensor-parallel GPUs holds of each layer; KV heads are copied where there are fewer."""
        parts = {name: getattr(self, name) // ranks for name in DIVIDED}
        return replace(self, kv_heads=max(1, self.kv_heads // ranks), **parts)


def read_geometry(config: Mapping[str, Any], origin: str, *, drafter: bool = False) -> Geometry:
    """The text model's sizes; a config of a model with vision has them in `text_config`. drafter: of a second model.

    Raises ManifestError for a key that is missing or no positive number.
    """
    text = text_of(config)

    def number(key: str, default: int | None = None) -> int:
        value = text.get(key, default)
        if type(value) is not int or value < (1 if default is None else 0):
            raise ManifestError(origin, key, value, "a positive whole number", next_step=NEXT)
        return value

    # Older configs say torch_dtype.
    types = [part[key] for part in (config, text) for key in ("dtype", "torch_dtype") if part.get(key)]
    dtype, ssm_dtype = (*types, "bfloat16")[0], text.get("mamba_ssm_dtype")
    for key, word in (("dtype", dtype), ("mamba_ssm_dtype", ssm_dtype or dtype)):
        if word not in DTYPE_BYTES:
            raise ManifestError(origin, key, word, f"one of {', '.join(DTYPE_BYTES)}", next_step=NEXT)
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
        max_positions=number("max_position_embeddings"),
        dtype=dtype,
        ssm_dtype=ssm_dtype,
        sliding=sliding,
        window=number("sliding_window") if sliding else 0,
        vision=any(str(name).endswith("ForConditionalGeneration") for name in config.get("architectures") or ()),
    )


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the text model."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def layer_kinds(text: Mapping[str, Any], layers: int, origin: str, known: Sequence[str]) -> list[str]:
    """One word a layer: from `layer_types`, else every n-th is full attention, else all are."""
    kinds = text.get("layer_types")
    if kinds is None:
        every = text.get("full_attention_interval") or 1
        return ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    unknown = [kind for kind in kinds if kind not in known]
    if unknown or len(kinds) != layers or {*kinds} == {"linear_attention"}:
        expected = f"{layers} of {' and '.join(known)}, not linear_attention alone"
        raise ManifestError(origin, "layer_types", unknown[:1] or f"{len(kinds)} entries", expected, next_step=NEXT)
    return [str(kind) for kind in kinds]
