"""Trained weights packed as INT4 and FP8: numbers near their own, the same bytes everywhere, no others' weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_samples import read_header, sample_paths
from places import PROJECT
from tiny_repository import Repo

from benchmarks.scripted_tiny import weights
from benchmarks.scripted_tiny.repositories import fp8_quantization, int4_quantization
from sparkpin.build.checkpoint import build_checkpoint
from sparkpin.checkpoint.from_gguf import bf16
from sparkpin.checkpoint.safetensors import TensorSource, write_file
from sparkpin.core.errors import IntegrityError, ManifestError
from sparkpin.core.files import write_json
from sparkpin.core.paths import Paths
from sparkpin.fetch import packed
from sparkpin.fetch.lock_model import lock_model
from sparkpin.fetch.packed import EXTRA_FILE
from sparkpin.pins import manifests

BODY, NAME = "model.language_model.", "words"
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


class Project:
    """A project with a folder of such weights, and its pin."""

    def __init__(self, root: Path) -> None:
        self.paths: Paths = sample_paths(root)
        self.folder = self.paths.project / "pins/models/words"
        self.folder.mkdir(parents=True)
        for name in packed.TEXTS:
            (self.folder / name).write_text(f"{name} ü\n")
        for name, quantization in (("int4", int4_quantization({}, iters=0)), ("fp8", fp8_quantization({}))):
            write_json(self.folder / f"config.{name}.json", CONFIG | {"quantization_config": quantization})
        (self.folder / "README.md").write_text("the card\n")
        self.file = self.folder / "model.safetensors"
        self.write(SHAPES)

    def write(self, shapes: dict[str, tuple[int, ...]]) -> None:
        sources = []
        for name, shape in shapes.items():
            raw = bf16(numbers(shape))
            sources.append(TensorSource(name, "BF16", shape, (raw.tobytes(),)))
        write_file(self.file, sources, {"format": "pt"})
        self.pin(hashlib.sha256(self.file.read_bytes()).hexdigest())

    def pin(self, sha256: str, **changes: Any) -> None:
        value = {
            "description": "words",
            "packed": {"path": "pins/models/words", "sha256": sha256},
            "base": "int4",
            "repositories": {key: {"repo": f"sparkpin/words-{key}", "revision": "0" * 40} for key in ("int4", "fp8")},
            "hybrid": {
                "rules": [{"modules": ["*.shared_expert.*"], "format": "fp8", "source": "fp8", "block": [128, 128]}]
            },
            "mtp": {"file": EXTRA_FILE, "tensors": ["mtp.*"]},
        }
        (self.folder.parent / f"{NAME}.yaml").write_text(json.dumps(value | changes))

    def pack(self, out: Path) -> tuple[Repo, Repo]:
        pin = manifests.load_model(self.paths.project, NAME)
        assert pin.packed
        packed.quantise(self.paths.project / pin.packed.path, pin.packed, out / "int4", out / "fp8")
        return Repo(out / "int4"), Repo(out / "fp8")

    def original(self, name: str) -> np.ndarray:
        info = read_header(self.file).tensors[name]
        raw = np.frombuffer(self.file.read_bytes()[info.begin : info.end], "<u2").reshape(info.shape)
        return packed.floats(raw)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_int4_is_as_near_as_four_bits_can_be(project: Project, tmp_path: Path) -> None:
    int4, _ = project.pack(tmp_path)
    for stem in (Q, f"{BODY}layers.0.mlp.experts.1.down_proj"):
        exact = project.original(f"{stem}.weight").astype(np.float64)
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
    assert packed.fp8_tensors("a.weight", raw) == packed.fp8_parts("a.weight", 256, 384, *weights.to_fp8(drawn))
    monkeypatch.setattr(packed, "STEPS", (7.0,))
    assert packed.int4_tensors("a.weight", raw) == packed.int4_parts("a.weight", 256, 384, *weights.to_int4(drawn))


def test_a_matrix_of_nothing_stays_nothing() -> None:
    none = np.zeros((128, 256), np.uint16)
    codes, _, scales = (tensor.data for tensor in packed.int4_tensors("a.weight", none).values())
    assert set(codes) == {0x88} and np.frombuffer(scales, "<f2").min() > 0
    assert set(packed.fp8_tensors("a.weight", none)["a.weight"].data) == {0}


def pinned(project: Project) -> None:
    """The commits are those that the error of a new pin names."""
    with pytest.raises(ManifestError) as error:
        lock_model(project.paths, NAME)
    path = project.folder.parent / f"{NAME}.yaml"
    value = json.loads(path.read_text())
    for key, entry in value["repositories"].items():
        entry["revision"] = error.value.next_step.partition(f"repositories.{key}.revision to ")[2][:40]
    path.write_text(json.dumps(value))


def test_the_same_commits_on_every_machine(project: Project) -> None:
    pinned(project)
    pin = manifests.load_model(project.paths.project, NAME)
    # Will fail if what packs makes other bytes: then the commits in pins/models/trained-tiny.yaml change, too.
    assert {key: one.revision for key, one in pin.repositories.items()} == {
        "int4": "5020905ee24fc2adfadbc3faa6d096cc288534e9",
        "fp8": "88f9d7f9d0224f97c8058bbab30fcda1ed150603",
    }
    lock_model(project.paths, NAME)
    lock = manifests.load_model_lock(project.paths.project, pin)
    joined = Repo(build_checkpoint(project.paths, pin, lock, ("copy", "hybrid", "mtp")))
    assert joined.info(f"{SHARED}.weight").dtype == "F8_E4M3" and joined.info(f"{Q}.qweight").dtype == "I32"
    assert "mtp.fc.weight" in joined.index["weight_map"]


def test_other_weights_are_one_clear_error(project: Project) -> None:
    data = bytearray(project.file.read_bytes())
    data[-1] ^= 1
    for damage in (bytes(data), b"version https://git-lfs.github.com/spec/v1\n", None):
        project.file.unlink()
        if damage is not None:
            project.file.write_bytes(damage)
        with pytest.raises(IntegrityError) as error:
            lock_model(project.paths, NAME)
        assert str(project.file) in error.value.message
        assert not list(project.paths.project.rglob("*.lock")) and not list(project.paths.cache.rglob("*.safetensors"))


def test_a_pin_has_one_way_to_its_pair(project: Project) -> None:
    sha256 = hashlib.sha256(project.file.read_bytes()).hexdigest()
    repositories = {key: {"repo": f"sparkpin/words-{key}", "revision": "0" * 40} for key in ("int4", "fp8", "more")}
    for more in (
        {"base": "fp8"},
        {"repositories": repositories},
        {"packed": {"path": "../elsewhere", "sha256": sha256}},
    ):
        project.pin(sha256, **more)
        with pytest.raises(ManifestError):
            manifests.load_model(project.paths.project, NAME)


def test_the_project_s_own_weights_are_the_pinned_ones() -> None:
    pin = manifests.load_model(PROJECT, "trained-tiny")
    assert pin.packed
    file = PROJECT / pin.packed.path / "model.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == pin.packed.sha256
    assert file.stat().st_size <= 48e6
