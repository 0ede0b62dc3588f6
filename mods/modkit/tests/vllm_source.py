"""What the mods touch in vLLM, read from its source: parameters and a hash, without importing it or torch.

``sparkpin_modkit/vllm_source.json`` holds that for each release that the mods name. To read a further one: unpack the
``vllm`` folder of its wheel for CUDA (only .py files are needed) as FOLDER/vllm-RELEASE/vllm, name the release in each
mod's touches.py, and run

    python mods/modkit/tests/vllm_source.py FOLDER

Releases that FOLDER lacks stay as they are, except for names that no mod touches any more.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

MODS = Path(__file__).resolve().parents[2]
sys.path.append(str(MODS / "modkit"))

from sparkpin_modkit.source import READ as DATA  # noqa: E402
from sparkpin_modkit.source import Source  # noqa: E402

MODULES = {
    "modkit": "sparkpin_modkit.touches",
    "guard": "sparkpin_guard.touches",
    "hybrid-int4-fp8": "sparkpin_hybrid.touches",
    "int8-lm-head": "sparkpin_int8_lm_head.touches",
    "draft-vocabulary": "sparkpin_draft_vocabulary.touches",
    "turboquant": "sparkpin_turboquant.touches",
}


def declarations(cuda: bool = True) -> dict[str, dict[str, Mapping[str, str | None]]]:
    """Each mod's TOUCHES, with ON_CUDA where it has that; the mods need not be installed."""
    for mod in MODULES:
        if str(MODS / mod) not in sys.path:
            sys.path.append(str(MODS / mod))
    found = {}
    for mod, name in MODULES.items():
        module = importlib.import_module(name)
        more = getattr(module, "ON_CUDA", {}) if cuda else {}
        found[mod] = {release: {**names, **more.get(release, {})} for release, names in module.TOUCHES.items()}
    return found


def releases_and_names() -> tuple[list[str], list[str]]:
    """Every release that some mod accepts, and every name that some mod touches in any."""
    declared = declarations().values()
    releases = {release for touches in declared for release in touches}
    names = {name for touches in declared for release in touches.values() for name in release}
    return sorted(releases), sorted(names)


def extract(folder: Path) -> dict[str, dict[str, object] | None]:
    """name -> what `Source.find` says, None for what this vLLM lacks. folder: holds the package ``vllm``."""
    source = Source(folder)
    found = {name: source.find(name) for name in releases_and_names()[1]}
    return {name: asdict(one) if one else None for name, one in found.items()}


def main(folder: Path) -> None:
    """Write DATA again, from FOLDER/vllm-RELEASE."""
    old = json.loads(DATA.read_text()) if DATA.exists() else {}
    releases, names = releases_and_names()
    data = {}
    for release in releases:
        source = folder / f"vllm-{release}"
        if source.is_dir():
            data[release] = extract(source)
        else:
            data[release] = {name: old[release][name] for name in names}
    DATA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
