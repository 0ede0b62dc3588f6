"""The trained model of the project: its weights become the two repositories that its lock names."""

from __future__ import annotations

from pathlib import Path

from places import PROJECT

from benchmarks.trained_tiny.quantise import MODEL, quantise
from sparkpin.core.files import sha256_file
from sparkpin.pins import manifests


def test_the_project_s_own_weights_give_what_is_locked(tmp_path: Path) -> None:
    pin = manifests.load_model(PROJECT, "trained-tiny")
    quantise(MODEL, tmp_path / "int4", tmp_path / "fp8")
    for name, entry in manifests.load_model_lock(PROJECT, pin).repositories.items():
        for file in entry.files:
            assert sha256_file(tmp_path / name / file.file) == (file.sha256, file.size)
