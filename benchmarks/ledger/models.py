"""Make what the second call serves, of the trained weights: `models.py PROJECT OUT`, with PROJECT/src on the path.

OUT/bf16 as trained; OUT/base INT4; OUT/mtp with shared experts in FP8 and the MTP layer; OUT/draft with that in FP8.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import traceback
from pathlib import Path

import yaml

from sparkpin.build.checkpoint import build_checkpoint
from sparkpin.core.paths import Paths
from sparkpin.fetch.lock_model import former_lock, lock_model
from sparkpin.pins import manifests

NAME = "trained-tiny"
STEPS = {"base": ("copy",), "mtp": ("copy", "hybrid", "mtp"), "draft": ("copy", "hybrid", "mtp")}


def placed(folder: Path, out: Path) -> None:
    """Whole, or not there: servers wait for it."""
    new = out.with_suffix(".new")
    shutil.copytree(folder, new)
    new.rename(out)


def main(project: Path, out: Path) -> None:
    placed(project / manifests.load_model(project, NAME).packed.folder, out / "bf16")
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
                lock = lock_model(paths, NAME, print) if where == other else former_lock(where, NAME, print)
                made = build_checkpoint(paths, manifests.load_model(where, NAME), lock, steps, print)
                placed(made, out / name)
            except Exception:  # the others are served all the same
                traceback.print_exc()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
