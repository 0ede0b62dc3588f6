"""A GGUF file of a Llama turned into a repository that vLLM loads: BF16 safetensors, config, tokenizer, chat template.

All that a server does with a file's metadata is decided by the keys in `KEYS` and in `gguf_tokenizer`; a key or tensor
that is not known here would be lost in silence, so it is refused. The same file gives the same bytes everywhere: NumPy
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
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's names of a layer's tensors -> those of transformers."""
KEYS = {
    "block_count": int,
    "context_length": int,
    "embedding_length": int,
    "feed_forward_length": int,
    "attention.head_count": int,
    "attention.head_count_kv": int,
    "attention.layer_norm_rms_epsilon": float,
    "rope.freq_base": float,
    "rope.dimension_count": int,
    "vocab_size": int,
}
"""Every key of the architecture that there may be, and must be."""


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

    def require(self, key: str, wanted: Any, **more: Any) -> None:
        if (seen := self.get(key, type(wanted), **more)) != wanted:
            raise self.wrong(key, repr(seen), repr(wanted))

    def require_known(self, start: str, known: Collection[str]) -> None:
        """CheckpointError for a key with that start that nothing reads: what it says would be lost."""
        for key in self.values:
            if key.startswith(start) and key not in known:
                raise self.wrong(key, repr(self.values[key])[:80], "no such key: nothing here reads it")

    def wrong(self, key: str, seen: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key}: saw {seen}, wanted {wanted}", next_step=OTHER)


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama. head: of one head; heads, kv_heads: how many; base, epsilon: of RoPE and of the norms."""

    layers: int
    context: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    base: float
    epsilon: float

    @classmethod
    def of(cls, metadata: Metadata) -> LlamaShape:
        metadata.require("general.architecture", ARCHITECTURE)
        keys = {f"{ARCHITECTURE}.{key}": kind for key, kind in KEYS.items()}
        metadata.require_known(f"{ARCHITECTURE}.", keys)
        found = [metadata.get(key, kind) for key, kind in keys.items()]
        layers, context, hidden, intermediate, heads, kv_heads, epsilon, base, head, vocabulary = found
        if min(layers, context, hidden, intermediate, heads, kv_heads, head, vocabulary) < 1 or hidden != heads * head:
            raise metadata.wrong("llama.embedding_length", f"{hidden} of {heads} heads of {head}", "heads x their size")
        if heads % kv_heads or head % 2:
            raise metadata.wrong("llama.attention.head_count_kv", f"{kv_heads} of {heads}", "a divisor of them")
        sizes = (layers, context, hidden, intermediate, heads, kv_heads, head, vocabulary)
        return cls(*sizes, base=short(base), epsilon=short(epsilon))

    def config(self, metadata: Metadata) -> dict[str, Any]:
        """config.json. transformers 5 reads `rope_theta` and `torch_dtype` as 4 did."""
        ids = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos")}
        return {
            **ids,
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "head_dim": self.head,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id", int),
            "rms_norm_eps": self.epsilon,
            "rope_scaling": None,
            "rope_theta": self.base,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
        }

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """llama.cpp's name of each tensor -> that of transformers, and its shape. The embedding is the head, too."""
        kv, rows = self.kv_heads * self.head, self.hidden
        shapes = {
            "attn_norm": (self.hidden,),
            "attn_q": (rows, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, rows),
            "ffn_norm": (self.hidden,),
            "ffn_gate": (self.intermediate, self.hidden),
            "ffn_up": (self.intermediate, self.hidden),
            "ffn_down": (self.hidden, self.intermediate),
        }
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            "token_embd.weight": ("model.embed_tokens.weight", (self.vocabulary, self.hidden)),
            "output_norm.weight": ("model.norm.weight", (self.hidden,)),
        }
        for layer in range(self.layers):
            for own, name in LAYER.items():
                found[f"blk.{layer}.{own}.weight"] = f"model.layers.{layer}.{name}.weight", shapes[own]
        return found


def convert(path: Path, folder: Path) -> None:
    """Make `folder`, which must not exist, from the GGUF file at `path`. Raises CheckpointError, before it appears."""
    reader, metadata = read(path)
    shape = LlamaShape.of(metadata)
    sources = list(sources_of(reader, shape, metadata))
    with atomic_folder(folder) as made:
        config = shape.config(metadata)
        write_json(made / "config.json", config)
        write_json(made / "generation_config.json", {k: v for k, v in config.items() if k.endswith("_token_id")})
        write_tokenizer(made, metadata, vocabulary=shape.vocabulary, context=shape.context)
        write_file(made / SAFETENSORS, sources, {"format": "pt"})


def read(path: Path) -> tuple[GGUFReader, Metadata]:
    """The reader, which keeps the file mapped, and its metadata. CheckpointError for what is no whole GGUF file."""
    from gguf import GGUFReader  # with NumPy, 0.4 s to import

    try:
        reader = GGUFReader(path)
        if reader.byte_order != "I":
            raise ValueError("its numbers are stored with the highest byte first")
        values = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        message = f"{path.name}: saw no whole GGUF file ({error}), wanted one"
        raise CheckpointError(message, next_step=OTHER) from error
    return reader, Metadata(path.name, values)


def sources_of(reader: GGUFReader, shape: LlamaShape, metadata: Metadata) -> Iterator[TensorSource]:
    """Every tensor that there must be, and no other; each is computed when it is written."""
    wanted, there = shape.tensors(), {tensor.name: tensor for tensor in reader.tensors}
    if unknown := sorted(there.keys() - wanted.keys()):
        raise metadata.wrong("tensors", unknown[0], "only those of a Llama whose embedding is its head, too")
    if absent := sorted(wanted.keys() - there.keys()):
        raise metadata.wrong("tensors", f"no {absent[0]}", f"the {len(wanted)} of a Llama of {shape.layers} layers")
    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}
    for own, (name, size) in wanted.items():
        tensor = there[own]
        if tensor.tensor_type.name not in QUANTISATIONS:
            raise metadata.wrong(own, tensor.tensor_type.name, f"one of {', '.join(QUANTISATIONS)}")
        if (seen := tuple(reversed(tensor.shape.tolist()))) != size:
            raise metadata.wrong(own, str(list(seen)), str(list(size)))
        yield TensorSource(name, "BF16", size, Chunks(tensor, heads.get(own.split(".")[-2], 0), metadata))


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

    RoPE turns pairs of rows. llama.cpp has the two of a pair beside each other, transformers in the halves of a head.
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
