"""A GGUF file of a Llama turned into a repository that vLLM loads: BF16 safetensors, config, tokenizer, chat template.

All that a server does with a file's metadata is decided by the keys in `KEYS` and `KEYS_OF_TOKENIZER`; any other
key or tensor would be lost without a warning, so it is refused. The same file gives the same bytes everywhere: NumPy
multiplies and adds in float32, step by step, and nothing is left to threads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkpin.checkpoint.safetensors import TensorSource, write_file
from sparkpin.core.errors import CheckpointError
from sparkpin.core.files import atomic_file, atomic_folder, write_json

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

IDS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
IDS_OF_CONFIG = ("bos", "eos", "pad")
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

NORMAL, CONTROL, ADDED = 1, 3, 4
"""Of llama.cpp's kinds of token those that byte-level BPE has: of merges, special, and matched as they stand."""

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLITS = {"smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}}
"""llama.cpp's name of how text is split before the merges -> the same for `tokenizers`."""

FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
KEYS_OF_TOKENIZER = {
    *(f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "token_type", "merges")),
    *(f"tokenizer.ggml.add_{key}" for key in ("bos_token", "eos_token", "space_prefix")),
    *(f"tokenizer.ggml.{key}_token_id" for key in IDS.values()),
    "tokenizer.chat_template",
}


class Metadata(NamedTuple):
    """The keys of a GGUF file. where: its name, for messages."""

    where: str
    values: Mapping[str, Any]

    def get(self, key: str, kind: type) -> Any:
        if type(value := self.values.get(key)) is not kind:
            raise self.wrong(key, f"{value!r:.80}", f"a value ({kind.__name__})")
        return value

    def require(self, key: str, *expected: Any) -> None:
        if (got := self.values.get(key)) not in expected:
            raise self.wrong(key, f"{got!r:.80}", f"one of {', '.join(map(str, expected))}")

    def require_known(self, start: str, known: Collection[str]) -> None:
        """CheckpointError for a key with that start that nothing reads: what it says would be lost."""
        if odd := [key for key in self.values if key.startswith(start) and key not in known]:
            raise self.wrong(odd[0], f"{self.values[odd[0]]!r:.80}", "no such key: nothing here reads it")

    def wrong(self, key: str, got: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key}: got {got}, expected {expected}", next_step=OTHER)


def config_of(metadata: Metadata) -> dict[str, Any]:
    """config.json. CheckpointError for a key that is missing, or unknown here."""
    import numpy as np

    metadata.require("general.architecture", ARCHITECTURE)
    metadata.require_known(f"{ARCHITECTURE}.", {f"{ARCHITECTURE}.{key}" for key in KEYS})
    config = {name: metadata.get(f"{ARCHITECTURE}.{key}", kind) for key, (name, kind) in KEYS.items()}
    # The shortest decimal that is the same float32: 1e-05, and not 9.999999747378752e-06.
    config |= {name: float(str(np.float32(value))) for name, value in config.items() if type(value) is float}
    if odd := [name for name, value in config.items() if not 0 < value < math.inf]:
        raise metadata.wrong(odd[0], str(config[odd[0]]), "a finite number above 0")
    ids = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{IDS[name]}_token_id", int) for name in IDS_OF_CONFIG}
    return CONFIG | config | ids


def tensors_of(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """llama.cpp's name of each tensor -> that of transformers, and its shape. The embedding is the head, too."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    rows, kv = (config[heads] * config["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "attn_norm": ("input_layernorm", (hidden,)),
        "attn_q": ("self_attn.q_proj", (rows, hidden)),
        "attn_k": ("self_attn.k_proj", (kv, hidden)),
        "attn_v": ("self_attn.v_proj", (kv, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, rows)),
        "ffn_norm": ("post_attention_layernorm", (hidden,)),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden)),
        "ffn_up": ("mlp.up_proj", (inner, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, inner)),
    }
    return {
        "token_embd.weight": ("model.embed_tokens.weight", (config["vocab_size"], hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
        **{
            f"blk.{number}.{part}.weight": (f"model.layers.{number}.{name}.weight", shape)
            for number in range(config["num_hidden_layers"])
            for part, (name, shape) in layer.items()
        },
    }


def convert(path: Path, folder: Path) -> None:
    """Make `folder`, which must not exist, from the GGUF file at `path`. Raises CheckpointError, before it appears."""
    reader, metadata = read(path)
    config = config_of(metadata)
    sources = list(sources_of(reader, config, metadata))
    with atomic_folder(folder) as partial:
        write_json(partial / "config.json", config)
        write_json(
            partial / "generation_config.json", {key: config[key] for key in config if key.endswith("_token_id")}
        )
        write_tokenizer(partial, metadata, vocabulary=config["vocab_size"], context=config["max_position_embeddings"])
        write_file(partial / SAFETENSORS, sources, {"format": "pt"})


def write_tokenizer(folder: Path, metadata: Metadata, *, vocabulary: int, context: int) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template. CheckpointError for what is not known here."""
    metadata.require_known("tokenizer.", KEYS_OF_TOKENIZER)
    metadata.require("tokenizer.ggml.model", "gpt2")
    metadata.require("tokenizer.ggml.pre", *SPLITS)
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        metadata.require(f"tokenizer.ggml.{key}", False, None)
    tokens, kinds, merges = (metadata.get(f"tokenizer.ggml.{key}", list) for key in ("tokens", "token_type", "merges"))
    if not len(tokens) == len(kinds) == len(set(tokens)) == vocabulary:
        raise metadata.wrong("tokenizer.ggml.tokens", f"{len(tokens):,}", f"{vocabulary:,} different ones, each a kind")
    if strange := set(kinds) - {NORMAL, CONTROL, ADDED}:
        raise metadata.wrong("tokenizer.ggml.token_type", str(min(strange)), f"{NORMAL}, {CONTROL} or {ADDED}")
    special = {name: metadata.get(f"tokenizer.ggml.{key}_token_id", int) for name, key in IDS.items()}
    if odd := [name for name, i in special.items() if not 0 <= i < vocabulary]:
        raise metadata.wrong(f"{odd[0]} token", str(special[odd[0]]), f"the number of one of {vocabulary:,} tokens")
    added = [
        {"id": i, "content": token, **FLAGS, "special": kind == CONTROL}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != NORMAL
    ]
    value = {
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": SPLITS[metadata.values["tokenizer.ggml.pre"]],
        "decoder": BYTE_LEVEL,
        "model": {
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],  # no token of byte-level BPE holds a space
        },
    }
    write_json(folder / "tokenizer.json", value)
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(row["id"]): {k: v for k, v in row.items() if k != "id"} for row in added},
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokens[i] for name, i in special.items()},
    }
    write_json(folder / "tokenizer_config.json", config)
    with atomic_file(folder / "chat_template.jinja") as file:
        file.write(metadata.get("tokenizer.chat_template", str).encode())


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
        raise metadata.wrong("tensors", cause, f"the {len(expected)} of a Llama whose embedding is also its head")
    for original, (name, shape) in expected.items():
        tensor = there[original]
        if tensor.tensor_type.name not in QUANTISATIONS:
            raise metadata.wrong(original, tensor.tensor_type.name, f"one of {', '.join(QUANTISATIONS)}")
        if (found := tuple(reversed(tensor.shape.tolist()))) != shape:
            raise metadata.wrong(original, str(list(found)), str(list(shape)))
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        data = weights_of(tensor, metadata, heads.get(original.split(".")[-2], 0))
        yield TensorSource(name, "BF16", shape, data)


def weights_of(tensor: ReaderTensor, metadata: Metadata, heads: int) -> Iterator[bytes]:
    """A tensor in BF16, computed when it is asked for. heads: of q_proj and k_proj, whose rows llama.cpp reorders."""
    import numpy as np
    from gguf.quants import dequantize

    weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if not np.isfinite(weights).all():
        raise metadata.wrong(tensor.name, "NaN or infinity", "finite numbers")
    if heads:  # RoPE turns pairs of rows: llama.cpp has the two side by side, transformers in the halves of a head
        rows, columns = weights.shape
        weights = weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    yield bf16(weights).tobytes()


def bf16(weights: np.ndarray) -> np.ndarray:
    """float32 -> the upper 16 bits as uint16, rounded to the nearest, ties to even. Finite numbers only."""
    import numpy as np

    bits = np.ascontiguousarray(weights).view(np.uint32)
    return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype("<u2")
