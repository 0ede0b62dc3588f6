"""The sizes of a model that decide its caches, read from config.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkpin.core.errors import ManifestError
from sparkpin.pins.reading import read_yaml

RULES: Any = read_yaml(Path(__file__).with_name("rules.yaml"))
DTYPE_BYTES: Mapping[str, int] = RULES["dtype_bytes"]
KNOWN = ("full_attention", "linear_attention", "sliding_attention")
NEXT = "choose a model whose config.json describes a Qwen3.5 or a plain attention model"


@dataclass(frozen=True, slots=True)
class Geometry:
    """attention, linear: layers of each kind, a drafter's with a sliding window counted as if they had none; draft: MTP
    layers, each with full attention.

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
    experts: int
    experts_per_token: int
    expert_width: int
    max_positions: int
    dtype: str
    ssm_dtype: str | None
    vision: bool

    @property
    def conv_width(self) -> int:
        """Channels of the short convolution: queries and keys, then values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def undivided(self, ranks: int) -> str:
        """The first size that `ranks` does not divide, though vLLM must divide it; "" where all are whole."""
        if self.kv_heads % ranks and ranks % self.kv_heads:
            return f"KV heads ({self.kv_heads})"
        sizes = ((what, getattr(self, name)) for name, what in RULES["divided"].items())
        return next((f"{what} ({size})" for what, size in sizes if size % ranks), "")

    def shard(self, ranks: int) -> Geometry:
        """What one of `ranks` tensor-parallel GPUs holds of each layer; KV heads are copied where there are fewer."""
        parts = {name: getattr(self, name) // ranks for name in RULES["divided"]}
        return replace(self, kv_heads=max(1, self.kv_heads // ranks), **parts)


def read_geometry(config: Mapping[str, Any], origin: str, *, drafter: bool = False) -> Geometry:
    """The text model's sizes; a config of a model with vision has them in `text_config`. drafter: of a second model.

    Raises ManifestError for a key that is missing or no positive number.
    """
    text = text_of(config)

    def number(keys: str, default: int | None = None) -> int:
        key = next((one for one in keys.split() if text.get(one)), keys.split()[0])
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
    linear = kinds.count("linear_attention")
    defaults = {"sizes": None, "linear_sizes": None if linear else 0, "optional_sizes": 0}
    sizes = {name: number(key, least) for table, least in defaults.items() for name, key in RULES[table].items()}
    return Geometry(
        attention=layers - linear,
        linear=linear,
        head_dim=number("head_dim", sizes["hidden"] // sizes["heads"]),
        dtype=dtype,
        ssm_dtype=ssm_dtype,
        vision=any(str(name).endswith("ForConditionalGeneration") for name in config.get("architectures") or ()),
        **sizes,
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
