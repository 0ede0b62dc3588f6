"""A Qwen3.5-MoE of the trained model's shape with random weights: each token depends on all before it. Made in seconds.

The embedding carries a code of one next token, which the LM head knows, so that some of the MTP layer's drafts are
right; the layers drown it often enough that others are not. The project's src is on the path.

`random_shape.py LIKE OUT dense`: a dense Qwen3 of the same sizes, for what vLLM has in no model with states.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparkpin.checkpoint.from_gguf import bf16
from sparkpin.checkpoint.safetensors import TensorSource, write_file

BODY = "model.language_model."
GAIN = 1.2  # what a layer's matrix does to the size of its input
MIXING = 2.5  # the same of what attention and states give: what is far back must move an answer
EXPERTS = 0.3  # of what experts give: rounding turns near ties of the router, and must move little
SURE = 1.0  # of the embedding's code, against the layers' noise
LOGITS = 1.2  # their standard deviation: what rounding does stays below what prove never tells
REMEMBERS = -7.0  # dt_bias: states of linear attention last for hundreds of tokens

SHAPE = Path(__file__).resolve().parents[2] / "pins/models/trained-tiny/config.json"
KEPT = ("vocab_size", "eos_token_id", "pad_token_id", "rope_parameters")  # of the scripted model, as its tokenizer


DENSE = (
    "bos_token_id", "dtype", "head_dim", "hidden_act", "hidden_size", "max_position_embeddings", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings",
)  # fmt: skip
"""Of the shape, that a dense model has as well."""


def dense(c: dict[str, Any]) -> dict[str, Any]:
    more = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
    more |= {"intermediate_size": 2 * c["hidden_size"], "num_hidden_layers": 4}
    return {key: c[key] for key in DENSE} | more


def dense_layer(c: dict[str, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, dim, wide = c["hidden_size"], c["head_dim"], c["intermediate_size"]
    heads, shared = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    yield f"{prefix}input_layernorm.weight", (hidden,)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    for name, rows in (("q", heads), ("k", shared), ("v", shared)):
        yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
    yield f"{prefix}self_attn.o_proj.weight", (hidden, heads)
    yield f"{prefix}self_attn.q_norm.weight", (dim,)
    yield f"{prefix}self_attn.k_norm.weight", (dim,)
    yield f"{prefix}mlp.gate_proj.weight", (wide, hidden)
    yield f"{prefix}mlp.up_proj.weight", (wide, hidden)
    yield f"{prefix}mlp.down_proj.weight", (hidden, wide)


def layer(c: dict[str, Any], prefix: str, *, full: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of matrices [out, in], and of vectors."""
    hidden, dim = c["hidden_size"], c["head_dim"]
    heads, shared = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    yield f"{prefix}input_layernorm.weight", (hidden,)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    if full:
        for name, rows in (("q", 2 * heads), ("k", shared), ("v", shared)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, heads)
        yield f"{prefix}self_attn.q_norm.weight", (dim,)
        yield f"{prefix}self_attn.k_norm.weight", (dim,)
    else:
        own, few = f"{prefix}linear_attn.", c["linear_num_value_heads"]
        for name, rows in (("in_proj_qkv", 2 * keys + values), ("in_proj_z", values), ("in_proj_a", few),
                           ("in_proj_b", few)):  # fmt: skip
            yield f"{own}{name}.weight", (rows, hidden)
        yield f"{own}out_proj.weight", (hidden, values)
        yield f"{own}conv1d.weight", (2 * keys + values, 1, c["linear_conv_kernel_dim"])
        yield f"{own}A_log", (few,)
        yield f"{own}dt_bias", (few,)
        yield f"{own}norm.weight", (c["linear_value_head_dim"],)
    yield f"{prefix}mlp.gate.weight", (c["num_experts"], hidden)
    yield f"{prefix}mlp.shared_expert_gate.weight", (1, hidden)
    wide = [("shared_expert", c["shared_expert_intermediate_size"])]
    for name, width in [*wide, *((f"experts.{e}", c["moe_intermediate_size"]) for e in range(c["num_experts"]))]:
        yield f"{prefix}mlp.{name}.gate_proj.weight", (width, hidden)
        yield f"{prefix}mlp.{name}.up_proj.weight", (width, hidden)
        yield f"{prefix}mlp.{name}.down_proj.weight", (hidden, width)


def shapes(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    if c["model_type"] == "qwen3":
        for number in range(c["num_hidden_layers"]):
            yield from dense_layer(c, f"model.layers.{number}.")
        yield "model.norm.weight", (c["hidden_size"],)
        return
    hidden, every = c["hidden_size"], c["full_attention_interval"]
    for number in range(c["num_hidden_layers"]):
        yield from layer(c, f"{BODY}layers.{number}.", full=(number + 1) % every == 0)
    yield from layer(c, "mtp.layers.0.", full=True)
    for name in (f"{BODY}norm", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"):
        yield f"{name}.weight", (hidden,)


def values(name: str, shape: tuple[int, ...], chance: np.random.Generator) -> np.ndarray:
    if name.endswith("A_log"):
        return np.linspace(0.0, 1.5, shape[0])
    if name.endswith("dt_bias"):
        return np.full(shape, REMEMBERS)
    if name.endswith("linear_attn.norm.weight"):
        return np.ones(shape)
    if len(shape) == 1:  # Qwen3.5's norms multiply by 1 more
        more = 0.0 if name.startswith((BODY, "mtp.")) else 1.0
        return np.full(shape, more + (1.0 if "q_norm" in name or "k_norm" in name else 0.0))
    if len(shape) == 3:
        return chance.standard_normal(shape) * 0.3
    gain = (
        MIXING if "o_proj" in name or "out_proj" in name else EXPERTS if "experts" in name and "down" in name else GAIN
    )
    return chance.standard_normal(shape) * gain / shape[1] ** 0.5


def write(path: Path, c: dict[str, Any], seed: int) -> None:
    """A safetensors file with all of the model."""
    chance, hidden, words = np.random.default_rng(seed), c["hidden_size"], c["vocab_size"]
    codes = chance.standard_normal((words, hidden))
    after = chance.permutation(words)
    embedding = chance.standard_normal((words, hidden)) + SURE * codes[after]
    body = "model." if c["model_type"] == "qwen3" else BODY
    made = [(f"{body}embed_tokens.weight", embedding), ("lm_head.weight", codes * LOGITS / hidden**0.5)]
    if body == BODY:
        left = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], 1)
        made.append(("mtp.fc.weight", left + chance.normal(0, 0.02, (hidden, 2 * hidden))))
    made += [(name, values(name, shape, chance)) for name, shape in shapes(c)]
    sources = []
    for name, tensor in made:
        wide = name.endswith(("A_log", "linear_attn.norm.weight"))
        data = tensor.astype("<f4") if wide else bf16(tensor.astype(np.float32))
        sources.append(TensorSource(name, "F32" if wide else "BF16", tensor.shape, (data.tobytes(),)))
    write_file(path, sources)


def main(like: Path, out: Path, kind: str = "", seed: int = 1) -> None:
    """like: a folder with a config.json, a tokenizer and a chat template of that model type."""
    out.mkdir(parents=True, exist_ok=True)
    for file in like.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and "index" not in file.name:
            shutil.copy(file, out)
    own, c = (json.loads(file.read_text()) for file in (like / "config.json", SHAPE))
    c = (dense(c) if kind else c) | {key: own[key] for key in KEPT}
    (out / "config.json").write_text(json.dumps(c, indent=1))
    write(out / "model.safetensors", c, seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
