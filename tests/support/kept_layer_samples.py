"""Wheels of two generations, in which files stay, change, come and go, and locks of them with kept layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from places import PROJECT
from wheelhouse import make_wheel

from sparkpin.pins import manifests
from sparkpin.pins.schema import LockedFile, Stack, StackLock

LAYERS = [{"name": "low", "packages": ["dep", "gone"]}, {"name": "rest", "packages": ["*"]}]
SITE = "opt/vllm/lib/python3.11/site-packages"

# Two versions of one distribution: modules that stay, change, come and go; a file and a folder that change places;
# scripts; and folders that it shares with another distribution, or has alone.
DEP = {
    "dep/__init__.py": "VERSION = 1\n",
    "dep/same.py": "",
    "dep/old.py": "",
    "dep/part/__init__.py": "",
    "dep/part/deep.py": "",
    "dep/turns": "a file",
    "dep/moves/in.txt": "a folder",
    "shared/dep/mine.py": "",
    "shared/both.py": "",
    "dep-1.0.dist-info/entry_points.txt": "[console_scripts]\ndep-old = dep:main\ndep = dep:main\nboth = shared:main\n",
}
DEP_2 = {
    "dep/__init__.py": "VERSION = 2\n",
    "dep/same.py": "",
    "dep/new.py": "",
    "dep/turns/in.txt": "a folder",
    "dep/moves": "a file",
    "dep-2.0.dist-info/entry_points.txt": "[console_scripts]\ndep = dep:main\n",
}
OTHER = {
    "other.py": "",
    "shared/other/yours.py": "",
    "shared/both.py": "",
    "other-1.0.data/scripts/tool": "#!python\n",
    "other-1.0.dist-info/entry_points.txt": "[console_scripts]\nboth = shared:main\n",
}
GONE = {"gone/__init__.py": "", "gone/deep/x.py": "", "gone.pth": "\n", "gone-1.0.data/data/share/gone.txt": "x"}


def versions_of(folder: Path) -> dict[str, LockedFile]:
    return {
        "app": make_wheel(folder, "app", requires=["dep", "other", "gone"], files={"app.py": ""}),
        "app2": make_wheel(folder, "app", "2.0", requires=["dep==2.0", "other"], files={"app.py": "NEW = 1\n"}),
        "dep": make_wheel(folder, "dep", files=DEP),
        "dep2": make_wheel(folder, "dep", "2.0", files=DEP_2),
        "other": make_wheel(folder, "other", files=OTHER),
        "gone": make_wheel(folder, "gone", files=GONE),
    }


def stack_lock(*wheels: LockedFile, underlay: Sequence[LockedFile] = (), updates: Sequence[str] = ()) -> StackLock:
    return StackLock(
        stack="s", inputs="0" * 64, debs=[], wheels=list(wheels), underlay=list(underlay), updates=list(updates)
    )


def a_stack(name: str, layers: object = LAYERS) -> Stack:
    value = yaml.safe_load((PROJECT / "pins/stacks/cpu.yaml").read_text())
    value["python"] |= {"layers": layers, "requirements": ["app==1.0"], "exclude": {}}
    return manifests.parse(Stack, {**value, "name": name, "mods": ["modkit"]}, f"{name}.yaml")
