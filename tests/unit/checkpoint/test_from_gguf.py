"""GGUF files become repositories: every weight at its place, the tokenizer's ids, one error for what is not right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf_samples as samples
import numpy as np
import pytest
from checkpoint_samples import read_header
from gguf import quants
from gguf.constants import GGMLQuantizationType as Kind
from gguf_samples import HEADS, HIDDEN, TOKENS, write_gguf
from tokenizers import Tokenizer

from sparkpin.checkpoint.from_gguf import convert
from sparkpin.core.errors import CheckpointError


def converted(path: Path) -> Path:
    folder = path.parent / "made"
    convert(path, folder)
    return folder


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """As float32, which holds every BF16."""
    path = folder / "model.safetensors"
    data, found = path.read_bytes(), {}
    for name, info in read_header(path).tensors.items():
        assert info.dtype == "BF16"
        bits = np.frombuffer(data[info.begin : info.end], "<u2").astype(np.uint32) << 16
        found[name] = bits.view(np.float32).reshape(info.shape)
    return found


def rounded(weights: np.ndarray) -> np.ndarray:
    """To BF16 by the definition: of the two neighbours the nearer one, of two as near the one that ends in 0."""
    low = (weights.view(np.uint32) & 0xFFFF0000).view(np.float32)
    high = ((weights.view(np.uint32) & 0xFFFF0000) + np.uint32(0x10000)).view(np.float32)
    down, up = np.abs(weights - low), np.abs(high - weights)
    even = (low.view(np.uint32) >> 16) % 2 == 0
    return np.where((down < up) | ((down == up) & even), low, high)


def test_every_weight_is_at_its_place(tmp_path: Path) -> None:
    """Of a file as llama.cpp's converter writes it, with rows of q_proj and k_proj in its order."""
    made = tensors(converted(write_gguf(tmp_path / "m.gguf")))
    own = samples.own_weights()
    assert made.keys() == own.keys()
    for name, weights in own.items():
        assert np.array_equal(made[name], rounded(weights)), name


@pytest.mark.parametrize("kind", [samples.Q4_1, samples.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
def test_quantised_weights_are_at_their_places(kind: Kind, tmp_path: Path) -> None:
    made = tensors(converted(write_gguf(tmp_path / "m.gguf", kind=kind)))
    for part, heads in (("mlp.down_proj", 0), ("self_attn.k_proj", samples.KV_HEADS), ("self_attn.q_proj", HEADS)):
        name = f"model.layers.1.{part}.weight"
        own = samples.own_weights()[name]
        stored = samples.reordered(own, heads) if heads else own
        wanted = rounded(quants.dequantize(quants.quantize(stored, kind), kind))
        assert np.array_equal(samples.reordered(made[name], heads) if heads else made[name], wanted), name
        assert np.abs(made[name] - own).max() < 0.5, "near what was quantised"


def test_config_and_tokenizer(tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "m.gguf"))
    config = json.loads((folder / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-05, 1e5, True)
    assert (config["head_dim"], config["hidden_size"], config["vocab_size"]) == (HIDDEN // HEADS, HIDDEN, len(TOKENS))
    assert (folder / "chat_template.jinja").read_text() == samples.TEMPLATE
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("on he 42\n", "Türkçe ☕ <|im_end|>", "don't\t x"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode(" he").tokens == ["Ġhe"], "merges in their order"
    assert len(tokenizer.encode("42").ids) == 2, "each digit by itself"
    assert tokenizer.encode("<|im_end|>").ids == [samples.SPECIAL.index("<|im_end|>")]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    begin, end = samples.SPECIAL[1:3]
    assert (settings["eos_token"], settings["bos_token"], settings["pad_token"]) == (end, begin, end)


WEIGHTS = samples.own_weights()
BAD: list[tuple[dict[str, Any], str]] = [
    ({"architecture": "qwen3"}, "general.architecture"),
    ({"kind": Kind.Q5_1}, "Q5_1"),
    ({"llama__rope__freq_base": None}, "llama.rope.freq_base"),
    ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type"),
    ({"llama__block_count": 3}, "blk.2."),
    ({"llama__attention__head_count_kv": 1}, "attn_k.weight"),
    ({"tokenizer__ggml__pre": "llama-bpe"}, "tokenizer.ggml.pre"),
    ({"tokenizer__ggml__token_type": [6] * len(TOKENS)}, "tokenizer.ggml.token_type"),
    ({"tokenizer__chat_template": None}, "tokenizer.chat_template"),
    ({"llama__rope__freq_base": np.inf}, "rope_theta"),
    ({"weights": WEIGHTS | {"model.norm.weight": np.full(HIDDEN, np.inf, "f4")}}, "output_norm.weight"),
    ({"tokenizer__ggml__eos_token_id": len(TOKENS)}, "eos token"),
]


@pytest.mark.parametrize(("changes", "where"), BAD, ids=[where for _, where in BAD])
def test_what_is_not_known_is_refused(changes: dict[str, Any], where: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(CheckpointError, match=r"^m\.gguf: .*" + re.escape(where)):
        converted(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("left", [0, 3, 20, 3_000, -1, -5_000])
def test_a_file_that_is_cut_off(left: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", kind=samples.F32)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=r"m\.gguf: "):
        converted(path)
    assert not (tmp_path / "made").exists()
