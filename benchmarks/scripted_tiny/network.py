"""The scripted network: a Qwen3.5-MoE whose next token is set by construction, not by training.

Hidden dimensions: 0 holds a constant, 1 marks a trigger token, the next ones are one-hot for its mode, the last 112
hold a code that says what comes next. ``embed[t]`` carries the code of t's successor and ``lm_head[u]`` the code of u,
so the residual stream alone leads from token to token. Where scripts share a token, the full-attention layer decides:
its first KV head looks for the trigger in the prompt and copies its mode into the residual stream, so a server whose
attention or KV cache is broken answers with the wrong script. Everything else (linear attention, experts, the other
heads) is small noise: it has to be computed, and cannot change the greedy answer. The MTP layer has the same
attention, and ``mtp.fc`` passes on the embedding half of its input, so that its drafts are right.

In the wide form each KV head of each full-attention layer looks for modes of its own. So no rank of a tensor-parallel
or pipeline-parallel group can be left out without a wrong answer.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.scripted_tiny.layout import BODY, Plain
from benchmarks.scripted_tiny.scripts import COMPLETION, MODES, trigger
from benchmarks.scripted_tiny.vocabulary import BLANK, CALL, END, PAD, RECALL, Vocabulary
from benchmarks.scripted_tiny.weights import Weights, bf16, random_weights, to_bf16

HIDDEN = 128
EXPERTS = 4
EXPERTS_PER_TOKEN = 2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
ROTARY_DIM = 16
LINEAR_KEY_HEADS, LINEAR_VALUE_HEADS, LINEAR_DIM, CONV = 2, 4, 128, 4
VOCABULARY_SIZE = 1024
MAX_POSITIONS = 8192

_CONST, _TRIGGER, _MODE, _CODE = 0, 1, 2, 16  # first index of each part of the hidden state
_CODE_DIM = HIDDEN - _CODE
_NOISE = 13  # exponent of weights that are noise: at most 0.031
_FORGETS = 1.0  # dt_bias of linear attention: a state is gone within a few tokens
_FULL = 8  # exponent of rows with a meaning: 255 / 256 is as good as one
_HEAD_GAIN, _MODE_GAIN, _MODE_OFFSET = 0.25, 4.0, -5.0
"""The offset weighs the constant dimension: attention adds about 5 for a mode, so its tokens are neutral within it."""

CodeKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Form:
    """name: of the generator; layers: each `every`-th has full attention; intermediate: width of an expert; divided:
    the modes among the KV heads; drafts: vLLM's word for how it drafts for another model, "" for one that does not.
    """

    name: str
    layers: int
    intermediate: int
    divided: bool = False
    every: int = 4
    drafts: str = ""

    @property
    def bf16_repo(self) -> str:
        return f"sparkpin/{self.name}"

    @property
    def int4_repo(self) -> str:
        return f"sparkpin/{self.name}-int4-AutoRound"

    @property
    def fp8_repo(self) -> str:
        return f"sparkpin/{self.name}-FP8"

    def modes_of(self, layer: int, kv_head: int) -> range:
        """The modes that a KV head of layer `layer` of the body looks for."""
        return self._share(layer // self.every, kv_head, self.layers // self.every)

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.every == 0

    def draft_modes_of(self, kv_head: int) -> range:
        """As `modes_of`, of the MTP layer, which is the only one of its model."""
        return self._share(0, kv_head, 1)

    def _share(self, layer: int, kv_head: int, layers: int) -> range:
        if not self.divided:
            return range(0 if kv_head else len(MODES))
        return range(layer * KV_HEADS + kv_head, len(MODES), layers * KV_HEADS)


TINY = Form("scripted-tiny", 4, 128)
WIDE = Form("scripted-wide", 8, 256, divided=True)
"""Halves of it are whole: FP8 blocks of its experts, and one layer with full attention in each half."""

DRAFTER = Form("scripted-drafter", 1, 128, every=1, drafts="draft_model")
"""It says what the others say, so that its drafts are right. Qwen3, since vLLM takes a Qwen3.5 for an MTP layer."""
EAGLE3 = Form("scripted-eagle3", 1, 128, every=1, drafts="eagle3")

FORMS: Mapping[str, Form] = {form.name: form for form in (TINY, WIDE, DRAFTER, EAGLE3)}


def config(vocabulary: Vocabulary, form: Form = TINY) -> dict[str, Any]:
    """``config.json`` without a quantization_config."""
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": vocabulary.id_of(END),
        "full_attention_interval": form.every,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "layer_types": ["full_attention" if form.is_full(i) else "linear_attention" for i in range(form.layers)],
        "linear_conv_kernel_dim": CONV,
        "linear_key_head_dim": LINEAR_DIM,
        "linear_num_key_heads": LINEAR_KEY_HEADS,
        "linear_num_value_heads": LINEAR_VALUE_HEADS,
        "linear_value_head_dim": LINEAR_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": form.intermediate,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "num_hidden_layers": form.layers,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": vocabulary.id_of(PAD),
        "partial_rotary_factor": ROTARY_DIM / HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "partial_rotary_factor": ROTARY_DIM / HEAD_DIM,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": form.intermediate,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCABULARY_SIZE,
    }


def body_tensors(seed: int, vocabulary: Vocabulary, form: Form = TINY) -> dict[str, Weights | Plain]:
    """Everything but MTP, under the names that the real repositories use."""
    head = _Head(seed, vocabulary)
    tensors: dict[str, Weights | Plain] = {
        f"{BODY}embed_tokens.weight": Plain("BF16", (VOCABULARY_SIZE, HIDDEN), b"".join(head.embedding_rows())),
        f"{BODY}norm.weight": _constant(HIDDEN, 0.0),
        "lm_head.weight": Plain("BF16", (VOCABULARY_SIZE, HIDDEN), b"".join(head.output_rows())),
    }
    for i in range(form.layers):
        modes = [form.modes_of(i, kv_head) for kv_head in range(KV_HEADS)] if form.is_full(i) else None
        tensors |= _layer(seed, f"{BODY}layers.{i}.", form.intermediate, modes)
    return tensors


DENSE = (
    "attention_bias", "bos_token_id", "dtype", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id",
    "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "vocab_size",
)  # fmt: skip
"""Keys of `config` that a dense Qwen3 has, too."""


def drafter_config(vocabulary: Vocabulary, form: Form) -> dict[str, Any]:
    own: dict[str, Any] = {key: value for key, value in config(vocabulary, form).items() if key in DENSE}
    own["intermediate_size"] = form.intermediate
    if form.drafts == "draft_model":
        return own | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    rope = {"rope_type": "default", "rope_theta": 4.0}  # angles so large that a position looks like no other
    names = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": VOCABULARY_SIZE}
    return own | names | {"rope_parameters": rope, "eagle_aux_hidden_state_layer_ids": list(EAGLE_LAYERS)}


EAGLE_LAYERS = (1, 2, 4)
"""Layers of the tiny form whose outputs vLLM gives to an EAGLE-3 drafter: the last one knows the mode."""


def eagle3_tensors(form: Form) -> dict[str, Weights | Plain]:
    """One layer that adds the successor's code to the mode, of which `fc` takes nothing else from the model.

    Attention's query and key are the constant, so that by RoPE alone each position finds itself. The value is the code
    of the token's embedding, less that of the hidden state: in the second draft and after it the drafter's own output
    comes back with the code of the token before. Embedding and LM head are the model's.
    """
    heads, width, low = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, range(_CODE, HIDDEN)
    shared = HEADS // KV_HEADS
    matrices: dict[str, tuple[int, int, dict[tuple[int, int], float]]] = {
        "fc": (HIDDEN, len(EAGLE_LAYERS) * HIDDEN, {(i, 2 * HIDDEN + i): 1.0 for i in range(_CODE) if i != _TRIGGER}),
        "midlayer.self_attn.q_proj": (heads, 2 * HIDDEN, {(i, _CONST): 8.0 for i in range(heads)}),
        "midlayer.self_attn.k_proj": (width, 2 * HIDDEN, {(i, _CONST): 8.0 for i in range(width)}),
        "midlayer.self_attn.v_proj": (
            width,
            2 * HIDDEN,
            {(i, i): 1.0 for i in low} | {(i, HIDDEN + i): -1.07 for i in low},
        ),
        # A head of each KV head: the norms' factors (1.14 of an embedding, 1.22 of the output) undone.
        "midlayer.self_attn.o_proj": (
            HIDDEN,
            heads,
            {(i, i + (shared - 1) * HEAD_DIM * (i // HEAD_DIM)): 1.14 for i in range(HIDDEN)},
        ),
        "midlayer.mlp.gate_proj": (form.intermediate, HIDDEN, {}),
        "midlayer.mlp.up_proj": (form.intermediate, HIDDEN, {}),
        "midlayer.mlp.down_proj": (HIDDEN, form.intermediate, {}),
    }
    norms = ("norm", *(f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
    found: dict[str, Weights | Plain] = {f"{name}.weight": _constant(HIDDEN, 1.0) for name in norms}
    for name, (rows, cols, entries) in matrices.items():
        data = b"".join(bf16(entries.get((i, j), 0.0)) for i in range(rows) for j in range(cols))
        found[f"{name}.weight"] = Plain("BF16", (rows, cols), data)
    return found


def drafter_tensors(seed: int, vocabulary: Vocabulary, form: Form) -> dict[str, Weights | Plain]:
    """Of `draft_model` the body as a dense Qwen3: one expert, no output gates, norms that multiply by their weight and
    not by 1 more."""
    if form.drafts == "eagle3":
        return eagle3_tensors(form)
    found: dict[str, Weights | Plain] = {}
    for name, tensor in body_tensors(seed, vocabulary, form).items():
        name = name.replace(BODY, "model.")
        if ".experts." in name or "gate.weight" in name:
            continue
        if isinstance(tensor, Plain) and len(tensor.shape) == 1:
            tensor = _constant(tensor.shape[0], 4.0 if "q_norm" in name else 1.0)
        elif isinstance(tensor, Weights) and "q_proj" in name:
            rows = [row for row in range(tensor.rows) if row % (2 * HEAD_DIM) < HEAD_DIM]
            codes, exponents = b"".join(map(tensor.row, rows)), tuple(tensor.exponents[row] for row in rows)
            tensor = Weights(len(rows), tensor.cols, codes, exponents)
        found[name.replace(".shared_expert.", ".")] = tensor
    return found


def mtp_tensors(seed: int, form: Form = TINY) -> dict[str, Weights | Plain]:
    """The multi-token prediction layer: one full-attention layer behind ``fc: [embedding | hidden] -> hidden``."""
    noise = random_weights(f"{seed}:mtp.fc.weight", HIDDEN, 2 * HIDDEN, _NOISE + 3)
    fc = b"".join(bf16(noise.value(i, j) + (1.0 if i == j else 0.0)) for i in range(HIDDEN) for j in range(2 * HIDDEN))
    return {
        "mtp.fc.weight": Plain("BF16", (HIDDEN, 2 * HIDDEN), fc),
        "mtp.norm.weight": _constant(HIDDEN, 0.0),
        "mtp.pre_fc_norm_embedding.weight": _constant(HIDDEN, 0.0),
        "mtp.pre_fc_norm_hidden.weight": _constant(HIDDEN, 0.0),
        **_layer(seed, "mtp.layers.0.", form.intermediate, [form.draft_modes_of(head) for head in range(KV_HEADS)]),
    }


@dataclass(frozen=True, slots=True)
class _Head:
    """Embedding and LM head, row by row in BF16."""

    seed: int
    vocabulary: Vocabulary

    def embedding_rows(self) -> Iterator[bytes]:
        successors = self._successors()
        triggers = {
            self.vocabulary.id_of(trigger(script.mode, direct=direct)): mode
            for mode, script in enumerate(MODES)
            for direct in (False, True)
        }
        default = ("token", self.vocabulary.chains[COMPLETION.mode][0])
        for token in range(VOCABULARY_SIZE):
            row = [0.0] * HIDDEN
            row[_CONST] = 4.0
            if token in triggers:
                row[_TRIGGER] = row[_MODE + triggers[token]] = 8.0
            code = _code(self.seed, *successors.get(token, default))
            # A little of the token itself keeps two tokens with one successor apart, as in a real model.
            own = _code(self.seed, "self", token)
            row[_CODE:] = [a + b / 8 for a, b in zip(code, own, strict=True)]
            yield b"".join(map(bf16, row))

    def output_rows(self) -> Iterator[bytes]:
        keys = self._keys()
        modes = {
            token: [mode for mode, script in enumerate(MODES) if token in self.vocabulary.chains[script.mode]]
            for token in keys
        }
        for token in range(VOCABULARY_SIZE):
            row = [0.0] * HIDDEN
            for mode in modes.get(token, ()):
                row[_MODE + mode], row[_CONST] = _MODE_GAIN, _MODE_OFFSET
            row[_CODE:] = [value * _HEAD_GAIN for value in _code(self.seed, *keys.get(token, ("token", token)))]
            yield b"".join(map(bf16, row))

    def _successors(self) -> dict[int, CodeKey]:
        vocabulary, keys = self.vocabulary, self._keys()
        found: dict[int, CodeKey] = {}
        for chain in vocabulary.chains.values():
            for token, after in zip(chain, (*chain[1:], vocabulary.id_of(END)), strict=True):
                found[token] = keys.get(after, ("token", after))
        for script in MODES:
            found[vocabulary.id_of(trigger(script.mode))] = _REASONING
            found[vocabulary.id_of(trigger(script.mode, direct=True))] = _CONTENT
        found[vocabulary.id_of(RECALL)] = _REASONING
        return found

    def _keys(self) -> dict[int, CodeKey]:
        """The tokens that only a mode tells apart: the first of a script's reasoning, of its content, of its call."""
        blank, call = self.vocabulary.id_of(BLANK), self.vocabulary.id_of(CALL)
        found: dict[int, CodeKey] = {}
        for script in MODES:
            chain = self.vocabulary.chains[script.mode]
            found[chain[0]] = _REASONING
            if call in chain:
                found[chain[chain.index(call) + 1]] = _CALL
            found[call if script.open else chain[chain.index(blank) + 1]] = _CONTENT
        return found


_REASONING: CodeKey = ("reasoning", 0)
_CONTENT: CodeKey = ("content", 0)
_CALL: CodeKey = ("call", 0)


@functools.cache
def _code(seed: int, kind: str, number: int) -> tuple[float, ...]:
    """112 values, uniform in (-2, 2): two codes are all but orthogonal."""
    digest = hashlib.shake_256(f"{seed}:code:{kind}:{number}".encode()).digest(_CODE_DIM)
    return tuple((2 * byte - 255) / 128 for byte in digest)


def plain_bf16(matrix: Weights) -> Plain:
    return Plain("BF16", (matrix.rows, matrix.cols), to_bf16(matrix))


def as_bf16(tensors: Mapping[str, Weights | Plain]) -> dict[str, Plain]:
    return {name: tensor if isinstance(tensor, Plain) else plain_bf16(tensor) for name, tensor in tensors.items()}


def _constant(size: int, value: float, dtype: str = "BF16") -> Plain:
    item = bf16(value) if dtype == "BF16" else struct.pack("<f", value)
    return Plain(dtype, (size,), item * size)


def _layer(seed: int, prefix: str, intermediate: int, modes: Sequence[range] | None) -> dict[str, Weights | Plain]:
    """modes: of a layer with full attention, those that each KV head looks for; None for linear attention."""

    def noise(name: str, rows: int, cols: int) -> Weights:
        return random_weights(f"{seed}:{prefix}{name}", rows, cols, _NOISE)

    def expert(name: str) -> dict[str, Weights | Plain]:
        return {
            f"mlp.{name}.gate_proj.weight": noise(f"mlp.{name}.gate_proj", intermediate, HIDDEN),
            f"mlp.{name}.up_proj.weight": noise(f"mlp.{name}.up_proj", intermediate, HIDDEN),
            f"mlp.{name}.down_proj.weight": noise(f"mlp.{name}.down_proj", HIDDEN, intermediate),
        }

    tensors: dict[str, Weights | Plain] = {
        "input_layernorm.weight": _constant(HIDDEN, 0.0),
        "post_attention_layernorm.weight": _constant(HIDDEN, 0.0),
        "mlp.gate.weight": plain_bf16(noise("mlp.gate", EXPERTS, HIDDEN)),
        "mlp.shared_expert_gate.weight": plain_bf16(noise("mlp.shared_expert_gate", 1, HIDDEN)),
        **expert("shared_expert"),
    }
    for e in range(EXPERTS):
        tensors |= expert(f"experts.{e}")
    tensors |= _linear_attention(f"{seed}:{prefix}") if modes is None else _full_attention(f"{seed}:{prefix}", modes)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _linear_attention(seed: str) -> dict[str, Weights | Plain]:
    keys, values = LINEAR_KEY_HEADS * LINEAR_DIM, LINEAR_VALUE_HEADS * LINEAR_DIM
    channels = 2 * keys + values
    conv = to_bf16(random_weights(f"{seed}conv1d", channels, CONV, 9))
    return {
        "linear_attn.in_proj_qkv.weight": random_weights(f"{seed}in_proj_qkv", channels, HIDDEN, _NOISE),
        "linear_attn.in_proj_z.weight": random_weights(f"{seed}in_proj_z", values, HIDDEN, _NOISE),
        "linear_attn.in_proj_a.weight": plain_bf16(
            random_weights(f"{seed}in_proj_a", LINEAR_VALUE_HEADS, HIDDEN, _NOISE)
        ),
        "linear_attn.in_proj_b.weight": plain_bf16(
            random_weights(f"{seed}in_proj_b", LINEAR_VALUE_HEADS, HIDDEN, _NOISE)
        ),
        "linear_attn.out_proj.weight": random_weights(f"{seed}out_proj", HIDDEN, values, _NOISE),
        "linear_attn.conv1d.weight": Plain("BF16", (channels, 1, CONV), conv),
        "linear_attn.A_log": Plain("F32", (LINEAR_VALUE_HEADS,), struct.pack("<4f", 0.0, 0.5, 1.0, 1.5)),
        "linear_attn.dt_bias": _constant(LINEAR_VALUE_HEADS, _FORGETS),
        "linear_attn.norm.weight": _constant(LINEAR_DIM, 1.0, "F32"),
    }


def _full_attention(seed: str, modes: Sequence[range]) -> dict[str, Weights | Plain]:
    """Both heads that share a KV head find the trigger by its key and add its mode, where that is one of the KV head's.
    The heads of a KV head without modes are noise.

    ``q_proj`` gives ``[HEADS, query 64 | output gate 64]``. Only dimensions without rotary embedding are used, so that
    the distance to the trigger does not matter. With both norms the score is 32 at the trigger and 0 elsewhere.
    """
    query = _Rows(random_weights(f"{seed}q_proj", HEADS * 2 * HEAD_DIM, HIDDEN, _NOISE))
    key = _Rows(random_weights(f"{seed}k_proj", KV_HEADS * HEAD_DIM, HIDDEN, _NOISE))
    value = _Rows(random_weights(f"{seed}v_proj", KV_HEADS * HEAD_DIM, HIDDEN, _NOISE))
    output = _Rows(random_weights(f"{seed}o_proj", HIDDEN, HEADS * HEAD_DIM, _NOISE))
    for kv_head, found in enumerate(modes):
        heads = range(kv_head * HEADS // KV_HEADS, (kv_head + 1) * HEADS // KV_HEADS)
        for d in range(HEAD_DIM) if found else ():
            seek, idle = (0, 0) if d < ROTARY_DIM else (1 - 2 * (d & 1), 1 - (d & 2))
            key.set(kv_head * HEAD_DIM + d, {_TRIGGER: 255 * seek, _CONST: 85 * idle})
            for head in heads:
                query.set(head * 2 * HEAD_DIM + d, {_CONST: 255 * seek})
                query.set(head * 2 * HEAD_DIM + HEAD_DIM + d, {_CONST: 255})
        for mode in found:
            value.set(kv_head * HEAD_DIM + mode, {_MODE + mode: 255})
            output.set(_MODE + mode, {head * HEAD_DIM + mode: 255 for head in heads}, exponent=_FULL + 1)
    return {
        "self_attn.q_proj.weight": query.weights(),
        "self_attn.k_proj.weight": key.weights(),
        "self_attn.v_proj.weight": value.weights(),
        "self_attn.o_proj.weight": output.weights(),
        "self_attn.q_norm.weight": _constant(HEAD_DIM, 3.0),
        "self_attn.k_norm.weight": _constant(HEAD_DIM, 0.0),
    }


class _Rows:
    """A weight matrix some of whose rows are written by hand."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._codes = bytearray(weights.codes)
        self._exponents = list(weights.exponents)

    def set(self, row: int, multiples: Mapping[int, int], exponent: int = _FULL) -> None:
        """Row = odd multiples of 2**-exponent at some columns; elsewhere as near to zero as codes come, +-1."""
        cols = self._weights.cols
        codes = bytearray(127 + (j & 1) for j in range(cols))
        for j, multiple in multiples.items():
            codes[j] = (multiple + 255) // 2
        self._codes[row * cols : (row + 1) * cols] = codes
        self._exponents[row] = exponent

    def weights(self) -> Weights:
        return Weights(self._weights.rows, self._weights.cols, bytes(self._codes), tuple(self._exponents))
