"""A GGUF file of a Llama turned into a repository that vLLM loads: BF16 safetensors, config, tokenizer, chat template.

All that a server does with a file's metadata is decided by the keys in `KEYS` and in `gguf_tokenizer`; any other key
or tensor would be lost without a warning, so it is refused. The same file gives the same bytes everywhere: NumPy
multiplies and adds in float32, step by step, and nothing is left to threads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkpin.checkpoint.gguf_tokenizer import write_tokenizer
from sparkpin.checkpoint.safetensors import TensorSource, write_file
from sparkpin.core.errors import CheckpointError
from sparkpin.core.files import atomic_folder, write_json

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderTensor

OTHER = "pin another file in pins/models/ (docs/checkpoints.md, models from a GGUF file)"
ARCHITECTURE = "llama"
QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
SAFETENSORS = "model.safetensors"
KEYS = {
    "block_count": ("num_hidden_layers", int),
    "context_length": ("max_position_embeddings", int),
    "embedding_length": ("hidden_size", int),
    "feed_forward_length": ("intermediate_size", int),
    "attention.head_count": ("num_attention_heads", int),
    "attention.head_count_kv": ("num_key_value_heads", int),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float),
    "rope.freq_base": ("rope_theta", float),
    "rope.dimension_count": ("head_dim", int),
    "vocab_size": ("vocab_size", int),
}
"""Every key of the architecture that there may be, and must be -> its name in config.json."""

IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "model_type": "llama",
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""What all models here have in common. transformers 5 reads `rope_theta` and `torch_dtype` as 4 did."""


@dataclass(frozen=True)
class Metadata:
    """The keys of a GGUF file. where: its name, for messages."""

    where: str
    values: Mapping[str, Any]

    def get(self, key: str, kind: type, *, default: Any = None) -> Any:
        """CheckpointError for a missing key (if there is no default) and for a value of another kind."""
        value = self.values.get(key, default)
        if value is None:
            raise self.wrong(key, "no such key", f"a value ({kind.__name__})")
        if type(value) is not kind:
            raise self.wrong(key, repr(value)[:80], f"a value ({kind.__name__})")
        return value

    def require(self, key: str, expected: Any, **more: Any) -> None:
        if (got := self.get(key, type(expected), **more)) != expected:
            raise self.wrong(key, repr(got), repr(expected))

    def require_known(self, start: str, known: Collection[str]) -> None:
        """CheckpointError for a key with that start that nothing reads: what it says would be lost."""
        for key in self.values:
            if key.startswith(start) and key not in known:
                raise self.wrong(key, repr(self.values[key])[:80], "no such key: nothing here reads it")

    def wrong(self, key: str, got: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key}: got {got}, expected {expected}", next_step=OTHER)


def config_of(metadata: Metadata) -> dict[str, Any]:
    """config.json. CheckpointError for a key that is missing, unknown here, or of an impossible model."""
    metadata.require("general.architecture", ARCHITECTURE)
    metadata.require_known(f"{ARCHITECTURE}.", {f"{ARCHITECTURE}.{key}" for key in KEYS})
    config: dict[str, Any] = {name: metadata.get(f"{ARCHITECTURE}.{key}", kind) for key, (name, kind) in KEYS.items()}
    config = {name: short(value) if type(value) is float else value for name, value in config.items()}
    hidden, heads, kv_heads = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head = config["head_dim"]
    if min(value for value in config.values() if type(value) is int) < 1 or hidden != heads * head:
        raise metadata.wrong("llama.embedding_length", f"{hidden} of {heads} heads of {head}", "heads x their size")
    if heads % kv_heads or head % 2:
        raise metadata.wrong("llama.attention.head_count_kv", f"{kv_heads} of {heads}", "a divisor of them")
    ids = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id", int) for name, key in IDS.items()}
    return CONFIG | config | ids


def tensors_of(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """llama.cpp's name of each tensor -> that of transformers, and its shape. The embedding is the head, too."""
    hidden, inner, kv = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_key_value_heads"] * config["head_dim"],
    )
    layer = {
        "attn_norm": ("input_layernorm", (hidden,)),
        "attn_q": ("self_attn.q_proj", (hidden, hidden)),
        "attn_k": ("self_attn.k_proj", (kv, hidden)),
        "attn_v": ("self_attn.v_proj", (kv, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, hidden)),
        "ffn_norm": ("post_attention_layernorm", (hidden,)),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden)),
        "ffn_up": ("mlp.up_proj", (inner, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, inner)),
    }
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (config["vocab_size"], hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    for number in range(config["num_hidden_layers"]):
        for part, (name, shape) in layer.items():
            tensors[f"blk.{number}.{part}.weight"] = f"model.layers.{number}.{name}.weight", shape
    return tensors


def convert(path: Path, folder: Path) -> None:
    """Make `folder`, which must not exist, from the GGUF file at `path`. Raises CheckpointError, before it appears."""
    reader, metadata = read(path)
    config = config_of(metadata)
    sources = list(sources_of(reader, config, metadata))
    with atomic_folder(folder) as made:
        write_json(made / "config.json", config)
        write_json(made / "generation_config.json", {key: config[key] for key in config if key.endswith("_token_id")})
        write_tokenizer(made, metadata, vocabulary=config["vocab_size"], context=config["max_position_embeddings"])
        write_file(made / SAFETENSORS, sources, {"format": "pt"})


def read(path: Path) -> tuple[GGUFReader, Metadata]:
    """The reader, which keeps the file mapped, and its metadata. CheckpointError for what is no complete GGUF file."""
    from gguf import GGUFReader  # with NumPy, 0.4 s to import

    try:
        reader = GGUFReader(path)
        if reader.byte_order != "I":
            raise ValueError("its numbers are stored with the highest byte first")
        values = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        message = f"{path.name}: got no complete GGUF file ({error}), expected one"
        raise CheckpointError(message, next_step=OTHER) from error
    return reader, Metadata(path.name, values)


def sources_of(reader: GGUFReader, config: Mapping[str, Any], metadata: Metadata) -> Iterator[TensorSource]:
    """Every tensor that there must be, and no other; each is computed when it is written."""
    expected, there = tensors_of(config), {tensor.name: tensor for tensor in reader.tensors}
    for odd in sorted(there.keys() ^ expected.keys()):
        cause = odd if odd in there else f"no {odd}"
        raise metadata.wrong("tensors", cause, f"the {len(expected)} of a Llama whose embedding is its head, too")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for original, (name, shape) in expected.items():
        tensor = there[original]
        if tensor.tensor_type.name not in QUANTISATIONS:
            raise metadata.wrong(original, tensor.tensor_type.name, f"one of {', '.join(QUANTISATIONS)}")
        if (found := tuple(reversed(tensor.shape.tolist()))) != shape:
            raise metadata.wrong(original, str(list(found)), str(list(shape)))
        yield TensorSource(name, "BF16", shape, Chunks(tensor, heads.get(original.split(".")[-2], 0), metadata))


@dataclass(frozen=True)
class Chunks:
    """A tensor's bytes in BF16, computed each time. heads: of q_proj and k_proj, whose rows llama.cpp reorders."""

    tensor: ReaderTensor
    heads: int
    metadata: Metadata

    def __iter__(self) -> Iterator[bytes]:
        import numpy as np
        from gguf.quants import dequantize

        weights = dequantize(self.tensor.data, self.tensor.tensor_type).astype(np.float32, copy=False)
        if not np.isfinite(weights).all():
            raise self.metadata.wrong(self.tensor.name, "NaN or infinity", "numbers")
        yield bf16(own_order(weights, self.heads) if self.heads else weights).tobytes()


def own_order(weights: np.ndarray, heads: int) -> np.ndarray:
    """`[heads * d, n]` -> the same, the rows of each head in transformers' order.

    RoPE turns pairs of rows. llama.cpp has the two of a pair next to each other, transformers in the halves of a head.
    """
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def bf16(weights: np.ndarray) -> np.ndarray:
    """float32 -> the upper 16 bits as uint16, rounded to the nearest, ties to even. Finite numbers only."""
    import numpy as np

    bits = np.ascontiguousarray(weights).view(np.uint32)
    return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype("<u2")


def short(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, and not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))
