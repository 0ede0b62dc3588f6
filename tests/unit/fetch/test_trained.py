"""Trained weights as INT4 and FP8: numbers near their own, the same bytes everywhere, those that the lock names."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from checkpoint_samples import read_header
from tiny_repository import Repo

from benchmarks.scripted_tiny import weights
from benchmarks.scripted_tiny.layout import BODY, fp8_parts, int4_parts
from benchmarks.scripted_tiny.repositories import fp8_quantization, int4_quantization
from benchmarks.trained_tiny import quantise
from benchmarks.trained_tiny.quantise import fp8_tensors, int4_tensors
from sparkpin.checkpoint.from_gguf import bf16
from sparkpin.checkpoint.safetensors import TensorSource, write_file
from sparkpin.core.files import write_json
from sparkpin.fetch.packed import commit_of

Q = f"{BODY}layers.0.self_attn.q_proj"
SHARED = f"{BODY}layers.0.mlp.shared_expert.up_proj"
SHAPES = {
    f"{BODY}embed_tokens.weight": (8, 128),
    f"{Q}.weight": (256, 128),
    f"{BODY}layers.0.mlp.gate.weight": (2, 128),
    f"{BODY}layers.0.mlp.experts.1.down_proj.weight": (128, 256),
    f"{SHARED}.weight": (256, 128),
    "lm_head.weight": (8, 128),
    "mtp.fc.weight": (128, 256),
    "mtp.norm.weight": (128,),
    "mtp.pre_fc_norm_embedding.weight": (128,),
    "mtp.pre_fc_norm_hidden.weight": (128,),
    "mtp.layers.0.self_attn.q_proj.weight": (128, 128),
    "mtp.layers.0.mlp.gate.weight": (2, 128),
    **{f"mtp.layers.0.mlp.shared_expert.{part}_proj.weight": (128, 128) for part in ("down", "gate", "up")},
}
CONFIG = {"num_hidden_layers": 1, "hidden_size": 128, "mtp_num_hidden_layers": 1}


def numbers(shape: tuple[int, ...]) -> np.ndarray:
    """Of a normal distribution, each row of a size of its own, so that none of them passes for another."""
    drawn = np.frombuffer(hashlib.shake_256(str(shape).encode()).digest(4 * int(np.prod(shape))), np.uint8)
    near_normal = drawn.reshape(4, *shape).sum(axis=0, dtype=np.int64).astype(np.float32) / 256 - 2
    return (near_normal * (1 + np.arange(shape[0], dtype=np.float32).reshape(-1, *[1] * (len(shape) - 1))) / 64).astype(
        np.float32
    )


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A folder with such weights."""
    folder = tmp_path / "trained"
    folder.mkdir()
    for name in quantise.TEXTS:
        (folder / name).write_text(f"{name} ü\n")
    for name, quantization in (("int4", int4_quantization({}, iters=0)), ("fp8", fp8_quantization({}))):
        write_json(folder / f"config.{name}.json", CONFIG | {"quantization_config": quantization})
    sources = [TensorSource(name, "BF16", shape, (bf16(numbers(shape)).tobytes(),)) for name, shape in SHAPES.items()]
    write_file(folder / "model.safetensors", sources, {"format": "pt"})
    quantise.quantise(folder, tmp_path / "int4", tmp_path / "fp8")
    return folder


def original(folder: Path, name: str) -> np.ndarray:
    file = folder / "model.safetensors"
    info = read_header(file).tensors[name]
    return quantise.floats(np.frombuffer(file.read_bytes()[info.begin : info.end], "<u2").reshape(info.shape))


def test_int4_is_as_near_as_four_bits_can_be(trained: Path, tmp_path: Path) -> None:
    int4 = Repo(tmp_path / "int4")
    for stem in (Q, f"{BODY}layers.0.mlp.experts.1.down_proj"):
        exact = original(trained, f"{stem}.weight").astype(np.float64)
        got = int4.int4(stem)
        groups = exact.reshape(len(exact), -1, 128)
        step = np.abs(groups).max(axis=2, keepdims=True) / 7
        uncut = np.square(groups - np.round(groups / step) * step).mean(axis=2)
        error = np.square(got.reshape(groups.shape) - groups).mean(axis=2)
        assert (error <= uncut * 1.01).all(), "F16 rounds a scale"
        assert error.sum() < 0.97 * uncut.sum(), "a cut is chosen where it pays"
        assert (np.abs(got.reshape(groups.shape) - groups) <= 4.1 * step).all()


def test_both_forms_are_those_of_the_scripted_models_own_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two codes for one format: numbers that both take give the same bytes."""
    drawn = weights.random_weights("packed", 256, 384, 13)
    raw = np.frombuffer(drawn.bf16(), "<u2").reshape(256, 384)
    assert fp8_tensors("a.weight", raw) == fp8_parts("a.weight", 256, 384, *weights.to_fp8(drawn))
    monkeypatch.setattr(quantise, "STEPS", (7.0,))
    assert int4_tensors("a.weight", raw) == int4_parts("a.weight", 256, 384, *weights.to_int4(drawn))


def test_a_matrix_of_nothing_stays_nothing() -> None:
    none = np.zeros((128, 256), np.uint16)
    codes, _, scales = (tensor.data for tensor in int4_tensors("a.weight", none).values())
    assert set(codes) == {0x88} and np.frombuffer(scales, "<f2").min() > 0
    assert set(fp8_tensors("a.weight", none)["a.weight"].data) == {0}


def test_the_same_bytes_on_every_machine(trained: Path, tmp_path: Path) -> None:
    assert {name: commit_of(tmp_path / name) for name in ("int4", "fp8")} == {
        "int4": "5020905ee24fc2adfadbc3faa6d096cc288534e9",
        "fp8": "88f9d7f9d0224f97c8058bbab30fcda1ed150603",
    }
