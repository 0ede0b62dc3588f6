"""The sizes of a model that decide its caches, read from config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkpin.core.errors import ManifestError
from sparkpin.memory.architecture import Architecture, read_architecture
from sparkpin.pins.reading import read_yaml

RULES: Any = read_yaml(Path(__file__).with_name("rules.yaml"))
DTYPE_BYTES: Mapping[str, int] = RULES["dtype_bytes"]
NEXT = "choose a model whose config.json describes its text model as those of transformers do"


@dataclass(frozen=True, slots=True)
class Geometry:
    """layers: all of the model's; draft: MTP layers. architecture: what the layers store of a request. cache_dtype:
    vLLM's word for the type in which the checkpoint asks for it, "" where it has none.

    key_heads to value_dim are those of the linear attention (Gated DeltaNet), 0 where there is none.
    """

    layers: int
    draft: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    experts: int
    experts_per_token: int
    expert_width: int
    max_positions: int
    dtype: str
    cache_dtype: str
    vision: bool
    architecture: Architecture

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

    Raises ManifestError for a key that is missing or no positive number, and for settings that are no mapping.
    """
    text = text_of(config)
    for settings, name in ((config, "quantization_config"), (text, "rope_parameters")):
        if not isinstance(settings.get(name) or {}, Mapping):
            raise ManifestError(origin, name, settings[name], "a mapping", next_step=NEXT)

    def number(keys: str, default: int | None = None) -> int:
        key = next((one for one in keys.split() if text.get(one)), keys.split()[0])
        value = text.get(key, default)
        if type(value) is not int or value < (1 if default is None else 0):
            raise ManifestError(origin, key, value, "a positive whole number", next_step=NEXT)
        return value

    architecture = read_architecture(text, drafter=drafter)
    # Older configs have torch_dtype.
    types = [part[key] for part in (config, text) for key in ("dtype", "torch_dtype") if part.get(key)]
    dtype = (*types, "bfloat16")[0]
    for key, word in (("dtype", dtype), ("mamba_ssm_dtype", architecture.ssm_dtype or dtype)):
        if str(word) not in DTYPE_BYTES:
            raise ManifestError(origin, key, word, f"one of {', '.join(DTYPE_BYTES)}", next_step=NEXT)
    sizes = {name: number(key, 0 if architecture.unknown else None) for name, key in RULES["sizes"].items()}
    sizes |= {name: number(key, 0) for name, key in RULES["optional_sizes"].items()}
    return Geometry(
        layers=number("num_hidden_layers"),
        head_dim=number("head_dim", sizes["hidden"] // max(1, sizes["heads"])),
        dtype=dtype,
        cache_dtype=cache_dtype_of(config.get("quantization_config") or {}, architecture),
        vision="ForConditionalGeneration" in str(config.get("architectures")),
        architecture=architecture,
        **sizes,
    )


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the text model."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def cache_dtype_of(quantised: Mapping[str, Any], architecture: Architecture) -> str:
    """What vLLM takes for `auto`.

    utils/torch_utils.py, get_kv_cache_quant_algo_string; of compressed-tensors any scheme, but not for MLA:
    layers/attention/attention.py.
    """
    method = str(quantised.get("quant_method")).lower()
    if method in ("compressed-tensors", "compressed_tensors"):
        has_values = any(part.value for part in architecture.parts)
        return "fp8" if quantised.get("kv_cache_scheme") is not None and has_values else ""
    if not method.startswith("modelopt") and "modelopt" not in str(quantised.get("producer")):
        return ""
    inner = quantised.get("quantization")
    places = (inner, quantised) if isinstance(inner, Mapping) else (quantised,)
    schemes = (place.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo") for place in places)
    scheme = next(filter(None, schemes), "")
    if isinstance(scheme, Mapping):
        bits = scheme.get("num_bits") if scheme.get("type") == "float" else None
        scheme = "fp8" if bits == 8 and scheme.get("dynamic") is False else "nvfp4" if bits == 4 else ""
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(scheme).lower(), "")
