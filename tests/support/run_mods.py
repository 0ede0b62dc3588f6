"""Community mods as people write them: a folder with a run.sh, and a patch."""

from __future__ import annotations

from pathlib import Path

import tiny_images

BEFORE, AFTER = "VALUE = 41\n", "VALUE = 42\n"
PATCH = f"--- a/standin/__init__.py\n+++ b/standin/__init__.py\n@@ -1 +1 @@\n-{BEFORE}+{AFTER}"


def write_mod(project: Path, name: str, script: str, **files: str) -> Path:
    folder = project / "community" / name
    for file, text in {"run.sh": f"#!/bin/bash\nset -e\n{script}\n", **files}.items():
        tiny_images.write(folder / file, text)
    (folder / "run.sh").chmod(0o755)
    return folder
