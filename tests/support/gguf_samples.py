"""A tiny Llama as a GGUF file: two layers, four heads, weights that are all different, and a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, quants
from gguf.constants import GGMLQuantizationType as Kind

from benchmarks.scripted_tiny.tokenizer import byte_characters

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, LAYERS = 64, 96, 4, 2, 16, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "Ġ he", "o n"]
TOKENS = [*SPECIAL, *byte_characters(), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
Q4_1, Q8_0, F32 = Kind.Q4_1, Kind.Q8_0, Kind.F32


def own_weights() -> dict[str, np.ndarray]:
    """transformers' names -> float32, in transformers' order of rows."""
    chance = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return chance.normal(size=(rows, columns)).astype(np.float32)

    kv = KV_HEADS * HEAD
    found = {"model.embed_tokens.weight": matrix(len(TOKENS), HIDDEN), "model.norm.weight": matrix(1, HIDDEN)[0]}
    for layer in range(LAYERS):
        own = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", kv, HIDDEN),
            ("self_attn.v_proj", kv, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            found[f"{own}{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{own}{name}.weight"] = matrix(1, HIDDEN)[0]
    return found


LLAMA_CPP = {
    "embed_tokens": "token_embd", "norm": "output_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def own_name(name: str) -> str:
    """llama.cpp's of a tensor."""
    parts = name.split(".")
    made = LLAMA_CPP[parts[-2]]
    return f"blk.{parts[2]}.{made}.weight" if "layers" in parts else f"{made}.weight"


def reordered(weights: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter stores q_proj and k_proj (`LlamaModel.permute`)."""
    rows = weights.shape[0]
    return weights.reshape(heads, 2, rows // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


METADATA: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 256,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": HEAD,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    kind: Kind = F32,
    weights: Mapping[str, np.ndarray] | None = None,
    **changes: Any,
) -> Path:
    """changes: keys with `__` in place of the dot; None takes a key away. kind: of the matrices, all but the norms."""
    writer = GGUFWriter(path, architecture)
    values = METADATA | {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in values.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add[type(value)](key, value)
    for name, own in (own_weights() if weights is None else weights).items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2], 0)
        data = reordered(own, heads) if heads else own
        if kind == F32 or data.ndim == 1:
            writer.add_tensor(own_name(name), np.ascontiguousarray(data))
        else:
            writer.add_tensor(own_name(name), quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
