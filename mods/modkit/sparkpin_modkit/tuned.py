"""Tile sizes as data: a mod's package has a tuned.json with entries for each architecture that was looked at."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from sparkpin_modkit.errors import ModError
from sparkpin_modkit.switch import switch_name


def tuned_entries(mod: str, package: str, architecture: int, oldest: int) -> list[dict[str, Any]]:
    """The entries for a GPU; those that ``others`` names where the data have none of its own.

    Args:
        mod: name of the mod, as in ``mods/<name>``.
        package: where its tuned.json lies.
        architecture: compute capability times ten, 121 for 12.1.
        oldest: the least that its kernels run on.

    Raises:
        ModError: the GPU is older than that.
    """
    if architecture < oldest:
        raise ModError(
            f"{mod}: compute capability {architecture / 10} is too old, expected {oldest / 10} or newer; "
            f"set {switch_name(mod)}=0"
        )
    data = json.loads(resources.files(package).joinpath("tuned.json").read_text())
    name = str(architecture) if str(architecture) in data["tuned"] else data["others"]
    return list(data["tuned"][name])
