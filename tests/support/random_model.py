"""A tiny Qwen3.5-MoE with random weights: unlike the scripted one it is unsure of every token, so that what changes its
numbers shows. Repositories, pin and recipe for a copy of the project."""

from __future__ import annotations

import array
from pathlib import Path
from unittest import mock

import yaml

from benchmarks.scripted_tiny import network, repositories
from benchmarks.scripted_tiny.weights import Weights, to_fp8

NOISE = 10  # weights of up to 0.25: the layers drown what the embedding says


def doubled(weights: Weights) -> tuple[bytes, bytes]:
    """FP8 with scales twice as large: BF16's exponent begins at bit 7."""
    codes, scales = to_fp8(weights)
    return codes, array.array("H", (word + 0x80 for word in array.array("H", scales))).tobytes()


def add(project: Path, folder: Path, name: str, *, stage: str, length: int = 1024, damaged: bool = False) -> None:
    """Write the two repositories below `folder`, and pins/models/<name>.yaml and recipes/<name>.yaml.

    damaged: the FP8 repository's scales are twice what they should be.
    """
    encoder = doubled if damaged else to_fp8
    with mock.patch.object(network, "_NOISE", NOISE), mock.patch.object(repositories, "to_fp8", encoder):
        repositories.generate(folder, seed=7)
    pin = yaml.safe_load((project / "pins/models/scripted-tiny.yaml").read_text())
    del pin["packed"], pin["smoke"]
    pin["description"] = "random weights"
    for key, repository in zip(("int4", "fp8"), (repositories.INT4_REPO, repositories.FP8_REPO), strict=True):
        pin["repositories"][key] = {
            "repo": f"sparkpin/{name}-{key}",
            "revision": "unresolved",
            "folder": str(folder / repository),
        }
    (project / f"pins/models/{name}.yaml").write_text(yaml.safe_dump(pin))
    recipe = (project / "recipes/scripted-tiny.yaml").read_text()
    for old, new in {
        "name: scripted-tiny": f"name: {name}",
        "model: sparkpin/scripted-tiny-int4-AutoRound": f"model: sparkpin/{name}-int4",
        'model_revision: "d7b8395b378f1122ae3df910014a70f63f85b574"': "model_revision: unresolved",
        "container: sparkpin/scripted-tiny": f"container: sparkpin/{name}",
        "stage: v2-tq": f"stage: {stage}",
        "max_model_len: 2048": f"max_model_len: {length}",
    }.items():
        assert old in recipe, old
        recipe = recipe.replace(old, new, 1)
    (project / f"recipes/{name}.yaml").write_text(recipe)
